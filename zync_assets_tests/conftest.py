from zync_assets_tests.services import services, unique

__all__ = ["services", "unique"]
