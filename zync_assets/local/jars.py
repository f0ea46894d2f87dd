"""The broker and the registry, from Maven Central, once per user.

The Ivy that PySpark carries resolves them into ``$XDG_CACHE_HOME/zync`` (``~/.cache/zync``). A finished folder
appears there by one rename, so a kill in the middle leaves nothing that looks finished.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import quoteattr

from filelock import FileLock

from zync_assets.errors import SetupError

KAFKA_VERSION = "4.1.2"
REGISTRY_VERSION = "2.6.13.Final"
CENTRAL = "https://repo1.maven.org/maven2/"

# slf4j-simple is the smallest of slf4j's back ends; without one Kafka logs nothing at all. Its version is the
# slf4j-api's that Kafka depends on.
IVY = f"""<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">
  <info organisation="zync" module="local-services"/>
  <configurations><conf name="kafka"/><conf name="registry"/></configurations>
  <dependencies>
    <dependency org="org.apache.kafka" name="kafka_2.13" rev="{KAFKA_VERSION}" conf="kafka->runtime,master"/>
    <dependency org="org.slf4j" name="slf4j-simple" rev="1.7.36" conf="kafka->runtime,master"/>
    <dependency org="io.apicurio" name="apicurio-registry-app" rev="{REGISTRY_VERSION}" transitive="false"
                conf="registry->*">
      <artifact name="apicurio-registry-app" type="tar.gz" ext="tar.gz" m:classifier="all"/>
    </dependency>
  </dependencies>
</ivy-module>
"""


@dataclass(frozen=True)
class Jars:
    """``kafka``: the folder of all jars of the broker; ``registry``: the registry's runnable jar."""

    kafka: Path
    registry: Path


def resolve(java: Path) -> Jars:
    """The jars of this user's cache, fetched first where they are not there (180 MB, about a minute).

    Raises SetupError when they can't be fetched. Safe for several processes at once.
    """
    cache = cache_dir()
    home = cache / f"services-{hashlib.sha256(IVY.encode()).hexdigest()[:12]}"
    if not home.is_dir():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with FileLock(cache / "services.lock"):
                if not home.is_dir():
                    _fetch(java, cache, home)
        except OSError as error:
            raise SetupError(f"The broker and the registry could not be stored in {cache}: {error}.") from error
    return Jars(kafka=home / "kafka", registry=next((home / "registry").glob("*-runner.jar")))


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zync"


def _fetch(java: Path, cache: Path, home: Path) -> None:
    for leftover in cache.glob("fetching-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    if sys.stderr.isatty():
        print(
            f"fetching Kafka {KAFKA_VERSION} and Apicurio Registry {REGISTRY_VERSION} (180 MB) …",
            file=sys.stderr,
        )
    work = Path(tempfile.mkdtemp(prefix="fetching-", dir=cache))
    try:
        _run_ivy(java, work)
        done = work / "done"
        done.mkdir()
        (work / "out" / "kafka").rename(done / "kafka")
        (archive,) = (work / "out" / "registry").iterdir()
        with tarfile.open(archive) as tar:
            tar.extractall(done / "registry", filter="data")
        done.rename(home)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run_ivy(java: Path, work: Path) -> None:
    # Spark's own variable for a mirror; Maven Central where it is not set.
    root = os.environ.get("DEFAULT_ARTIFACT_REPOSITORY") or CENTRAL
    (work / "settings.xml").write_text(
        '<ivysettings><settings defaultResolver="central"/>'
        f"<caches defaultCacheDir={quoteattr(str(work / 'cache'))}/>"
        '<resolvers><ibiblio name="central" m2compatible="true" '
        f"root={quoteattr(root.rstrip('/') + '/')}/></resolvers></ivysettings>"
    )
    (work / "ivy.xml").write_text(IVY)
    pattern = f"{work}/out/[conf]/[artifact]-[revision](-[classifier]).[ext]"
    command = [
        java,
        *_proxies(),
        "-jar",
        _ivy_jar(),
        "-settings",
        work / "settings.xml",
        "-ivy",
        work / "ivy.xml",
    ]
    answer = subprocess.run(
        [*command, "-retrieve", pattern],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if answer.returncode != 0:
        reasons = [line.strip() for line in answer.stdout.splitlines() if "not found" in line or "SERVER ERROR" in line]
        detail = f" ({reasons[0]})" if reasons else ""
        raise SetupError(
            f"Kafka and the schema registry could not be fetched from {_without_login(root)}{detail}: the first "
            "start takes a network. Behind a proxy set HTTPS_PROXY, for a mirror DEFAULT_ARTIFACT_REPOSITORY."
        )


def _without_login(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _ivy_jar() -> Path:
    # find_spec does not import the package, which takes seconds.
    spec = importlib.util.find_spec("pyspark")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for jar in Path(location, "jars").glob("ivy-*.jar"):
            return jar
    raise SetupError("PySpark carries no ivy-*.jar here: install it whole (pip install --force-reinstall pyspark).")


def _proxies() -> list[str]:
    """The proxies of this environment as the JVM's properties."""
    options: list[str] = []
    for scheme, url in urllib.request.getproxies().items():
        parts = urllib.parse.urlsplit(url)
        if scheme in ("http", "https") and parts.hostname:
            options.append(f"-D{scheme}.proxyHost={parts.hostname}")
            options.append(f"-D{scheme}.proxyPort={parts.port or 80}")
    return options
