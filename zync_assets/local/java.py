"""Java: the installation that runs Kafka, the registry and Spark, and the jars that they need.

Spark 4 needs Java 17 or 21 with the module ``jdk.incubator.vector``, which trimmed runtimes leave out. Kafka and the registry
run on the same Java.

PySpark lacks the jars of the broker, of the registry and of Spark's S3 client. PySpark's own Ivy downloads them from Maven
Central, once per user, into ``$XDG_CACHE_HOME/zync`` (``~/.cache/zync``). One rename moves a finished folder to its place. A
kill during the download therefore leaves no folder that looks finished.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import quoteattr

from filelock import FileLock

from zync_assets.errors import SetupError

SUPPORTED_VERSIONS = (17, 21)
VECTOR_MODULE = "jdk.incubator.vector"
INSTALL = (
    "Install one (Debian, Ubuntu: apt-get install openjdk-17-jdk-headless; other systems: Temurin 17 from "
    "https://adoptium.net/temurin/releases?version=17)"
)


def find_java() -> Path:
    """The ``java`` of JAVA_HOME, else the one on PATH, as a resolved path.

    Raises SetupError where there is none, where it is neither 17 nor 21, or where it lacks a module that Spark
    needs. No JVM is started when the installation has a ``release`` file, as all OpenJDK builds do.
    """
    home = os.environ.get("JAVA_HOME")
    executable = _java_of_home(Path(home)) if home else _on_path()
    version = java_version(executable)
    match = re.match(r"(?:1\.)?(\d+)", version)
    major = int(match.group(1)) if match else 0
    if major not in SUPPORTED_VERSIONS:
        fault = (
            "too old"
            if major < SUPPORTED_VERSIONS[0]
            else "too new"
            if major > SUPPORTED_VERSIONS[-1]
            else "not supported"
        )
        raise SetupError(f"Java {version} at {executable} is {fault}: a full Java 17 or 21 is needed. {_cure(home)}")
    modules = _release(executable).get("MODULES")
    if modules is not None and VECTOR_MODULE not in modules.split():
        raise SetupError(
            f"Java {version} at {executable} lacks the module {VECTOR_MODULE} that Spark needs: "
            f"a full Java 17 or 21 is needed. {_cure(home)}"
        )
    return executable


def java_version(executable: Path) -> str:
    """The version of a ``java``, such as ``17.0.15``; SetupError if the executable does not run."""
    return _release(executable).get("JAVA_VERSION") or _ask(executable)


def _cure(home: str | None) -> str:
    return f"{INSTALL}, and set JAVA_HOME to its folder" + (f" (it is {home} now)." if home else ".")


def _java_of_home(home: Path) -> Path:
    executable = home / "bin" / "java"
    if not os.access(executable, os.X_OK):
        raise SetupError(
            f"JAVA_HOME is {home}, which holds no bin/java: set it to the folder of a full Java 17 or 21, "
            f"or unset it. {INSTALL}."
        )
    return executable.resolve()


def _on_path() -> Path:
    path = shutil.which("java")
    if path is None:
        raise SetupError(f"There is no Java: JAVA_HOME is not set and PATH holds no java. {INSTALL}.")
    return Path(path).resolve()


def _release(executable: Path) -> dict[str, str]:
    """The NAME="value" lines of the installation's ``release`` file; empty when there is no such file."""
    try:
        text = (executable.parent.parent / "release").read_text(errors="replace")
    except OSError:
        return {}
    return dict(re.findall(r'^(\w+)="(.*)"\s*$', text, re.MULTILINE))


def _ask(executable: Path) -> str:
    try:
        answer = subprocess.run([executable, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"Java at {executable} does not run ({error}). {INSTALL}.") from error
    match = re.search(r'version "([^"]+)"', answer.stderr + answer.stdout)
    if match is None:
        raise SetupError(f"Java at {executable} does not tell its version. {INSTALL}.")
    return match.group(1)


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


HADOOP_VERSION = "3.4.2"
"""The version of PySpark's own Hadoop."""
_SDK_VERSION = "2.29.52"
"""The version of the AWS SDK that this hadoop-aws was built with."""

# Hadoop depends on the SDK's bundle of all services (600 MB). S3 needs only these modules (10 MB). PySpark itself has the
# other dependencies.
S3_IVY = f"""<ivy-module version="2.0">
  <info organisation="zync" module="spark-s3"/>
  <configurations><conf name="jars"/></configurations>
  <dependencies>
    <dependency org="org.apache.hadoop" name="hadoop-aws" rev="{HADOOP_VERSION}" transitive="false" conf="jars->master"/>
    <dependency org="software.amazon.awssdk" name="s3" rev="{_SDK_VERSION}" conf="jars->runtime,master"/>
    <dependency org="software.amazon.awssdk" name="s3-transfer-manager" rev="{_SDK_VERSION}" conf="jars->runtime,master"/>
    <dependency org="software.amazon.awssdk" name="sts" rev="{_SDK_VERSION}" conf="jars->runtime,master"/>
    <exclude org="org.slf4j"/><exclude org="io.netty"/><exclude org="org.apache.httpcomponents"/>
    <exclude org="commons-codec"/><exclude org="commons-logging"/>
  </dependencies>
</ivy-module>
"""


@dataclass(frozen=True)
class Bundle:
    """Jars that are fetched together. ``ivy``: the Ivy file; ``label`` and ``content``: for those who wait, and in errors."""

    name: str
    ivy: str
    label: str
    content: str


@dataclass(frozen=True)
class Jars:
    """``kafka``: the folder of all jars of the broker; ``registry``: the registry's runnable jar."""

    kafka: Path
    registry: Path


_SERVICES = Bundle(
    "services",
    IVY,
    f"Kafka {KAFKA_VERSION} and Apicurio Registry {REGISTRY_VERSION} (180 MB)",
    "Kafka and the schema registry",
)
_S3 = Bundle("spark-s3", S3_IVY, f"Spark's way to S3, hadoop-aws {HADOOP_VERSION} (10 MB)", "Spark's jars for S3")


def resolve(java: Path) -> Jars:
    """The jars of this user's cache, fetched first where they are not there (180 MB, about a minute).

    Raises SetupError when they can't be fetched. Safe for several processes at once.
    """
    home = bundle_folder(_SERVICES, lambda: java, _unpack_registry)
    return Jars(kafka=home / "kafka", registry=next((home / "registry").glob("*-runner.jar")))


def spark_s3_jars(java: Callable[[], Path]) -> list[Path]:
    """The jars that Spark needs for ``s3a://``; as ``resolve``. ``java`` is asked for only where they are to be fetched."""
    return sorted((bundle_folder(_S3, java) / "jars").glob("*.jar"))


def bundle_folder(bundle: Bundle, java: Callable[[], Path], finish: Callable[[Path], None] | None = None) -> Path:
    """The folder of a bundle in this user's cache, with a folder of jars for each of its configurations.

    ``finish`` may change the folder before the folder moves to its final place.
    """
    cache = cache_dir()
    home = cache / f"{bundle.name}-{hashlib.sha256(bundle.ivy.encode()).hexdigest()[:12]}"
    if not home.is_dir():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with FileLock(cache / f"{bundle.name}.lock"):
                if not home.is_dir():
                    _fetch(bundle, java(), cache, home, finish)
        except OSError as error:
            raise SetupError(f"{bundle.content} could not be stored in {cache}: {error}.") from error
    return home


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zync"


def _fetch(bundle: Bundle, java: Path, cache: Path, home: Path, finish: Callable[[Path], None] | None) -> None:
    prefix = f"fetching-{bundle.name}-"
    for leftover in cache.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    print(f"fetching {bundle.label} …", file=sys.stderr)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=cache))
    try:
        _run_ivy(bundle, java, work)
        output = work / "out"
        if finish is not None:
            finish(output)
        output.rename(home)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _unpack_registry(folder: Path) -> None:
    (archive,) = (folder / "registry").iterdir()
    with tarfile.open(archive) as tar:
        # Python before 3.11.4 has no filters, and extracts without one. Debian 12 has Python 3.11.2.
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(folder / "registry")
    archive.unlink()


def _run_ivy(bundle: Bundle, java: Path, work: Path) -> None:
    # Spark's own variable for a mirror; Maven Central where it is not set.
    root = os.environ.get("DEFAULT_ARTIFACT_REPOSITORY") or CENTRAL
    (work / "settings.xml").write_text(
        '<ivysettings><settings defaultResolver="central"/>'
        f"<caches defaultCacheDir={quoteattr(str(work / 'cache'))}/>"
        '<resolvers><ibiblio name="central" m2compatible="true" '
        f"root={quoteattr(root.rstrip('/') + '/')}/></resolvers></ivysettings>"
    )
    (work / "ivy.xml").write_text(bundle.ivy)
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
            f"{bundle.content} could not be fetched from {_without_login(root)}{detail}: the first "
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
