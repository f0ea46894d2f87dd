from zync_assets_tests.checks.chain import chain, sound_chain
from zync_assets_tests.services import services, spark, unique

__all__ = ["chain", "services", "sound_chain", "spark", "unique"]
