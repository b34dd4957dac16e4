"""Images from models of continuous tokens."""
