"""Run the benchmarks: `python -m bench [handover] [block] [cold] [decode] [exactness]`."""

import sys

PARTS = ("handover", "block", "cold", "decode", "exactness")


def main() -> None:
    wanted = sys.argv[1:] or PARTS
    for part in wanted:
        if part not in PARTS:
            sys.exit(f"there are {', '.join(PARTS)}")
        __import__(f"bench.{part}", fromlist=["main"]).main()


if __name__ == "__main__":
    main()
