"""``python -m ddpan.analysis`` is the command ``ddpan``, for environments without its script on the path."""

from ddpan.analysis.cli import main

if __name__ == "__main__":
    main(prog_name="ddpan")
