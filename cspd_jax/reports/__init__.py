"""What a run leaves behind: its report and its pictures."""
