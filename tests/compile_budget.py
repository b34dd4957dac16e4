"""Programs and seconds of compilation by test file, as the last run of the tests counted them.

python -m pytest && python tests/compile_budget.py      # prints the table
python tests/compile_budget.py --write                  # allows what was compiled, and a tenth more
"""

from __future__ import annotations

import json
import sys

import budget


def main() -> int:
    if not budget.SPENT.exists():
        print("no run of the tests is recorded; run python -m pytest first", file=sys.stderr)
        return 2
    spent = json.loads(budget.SPENT.read_text(encoding="utf-8"))
    programs, seconds = spent["programs"], spent["compiling"]
    for file in sorted(programs, key=programs.get, reverse=True):
        print(f"{programs[file]:6d} {seconds[file]:7.1f} s  {file}")
    total = sum(programs.values())
    print(f"{total:6d} {sum(seconds.values()):7.1f} s  in all; {budget.ceiling()} are allowed")
    if "--write" in sys.argv[1:]:
        text = json.dumps({"programs": total + total // 10}) + "\n"
        budget.CEILING.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
