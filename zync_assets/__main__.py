"""``python -m zync_assets`` is the command ``zync``."""

from zync_assets.cli.main import main

if __name__ == "__main__":
    main()
