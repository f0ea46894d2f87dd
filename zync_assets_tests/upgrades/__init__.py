"""What earlier versions of this package made: lakes, topics, schemas and Dagster instances, a ``.tar.xz`` a commit.

``python -m zync_assets_tests.upgrades.make COMMIT`` makes the file of a commit, in a clone that has the commit.
``test_upgrades`` unpacks each file and goes on with the code of today.
"""
