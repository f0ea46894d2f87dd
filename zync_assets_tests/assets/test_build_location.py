"""Several pipelines in one code location, beside a user's own assets, executor and resources. No broker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from dagster import (
    AssetIn,
    AssetKey,
    AssetsDefinition,
    ComponentTree,
    DagsterError,
    DagsterInstance,
    Definitions,
    Failure,
    asset,
    define_asset_job,
    in_process_executor,
    multiprocess_executor,
)

from zync_assets import (
    KafkaResource,
    PipelineFileError,
    RegistryResource,
    SetupError,
    ZyncPipelineComponent,
    build_definitions,
    load_pipeline,
)
from zync_assets.assets.names import Names
from zync_assets.assets.runs import ActiveRuns
from zync_assets.pipeline import Pipeline
from zync_assets_tests.test_readme import ROOT

FILE = """
kafka: {{bootstrap.servers: "192.0.2.1:9092"}}
lake: {lake}
inputs: [{{topic: {topic}, pool: {raw}, format: json}}]
outputs: [{{topic: {out}, pool: {staging}, format: json}}]
transforms: [{{type: stateless, in: {topic}, out: {out}, key: in.key, value: in.value}}]
"""


@pytest.fixture
def topic(unique: str) -> str:
    """A topic of the test's own: the process remembers the topics of all pipelines."""
    return f"{unique}.orders"


def pipeline(folder: Path, name: str, topic: str, lake: str | None = None, raw: str | None = None) -> Pipeline:
    """A pipeline from ``topic`` to the topic ``<name>-out``, in pools of its own."""
    path = folder / f"{name}.yaml"
    pools = {"raw": raw or f"Raw_{name}", "staging": f"Staging_{name}"}
    path.write_text(FILE.format(topic=topic, out=f"{topic}-{name}", lake=lake or f"./lake_{name}", **pools))
    return load_pipeline(path)


def keys(definitions: Definitions) -> set[str]:
    return {key.to_user_string() for key in definitions.resolve_all_asset_keys()}


def test_two_pipelines_of_one_topic_stand_beside_assets_executor_and_resources_of_ones_own(
    tmp_path: Path, topic: str
) -> None:
    a, b = pipeline(tmp_path, "a", topic), pipeline(tmp_path, "b", topic)

    @asset(ins={"rows": AssetIn(["Staging_b", f"{topic}-b"])}, required_resource_keys={"spark", "pool_io"})
    def report(rows: object) -> None: ...

    own = Definitions(
        assets=[report],
        jobs=[define_asset_job("report_job", [report])],
        executor=multiprocess_executor,
        resources={"spark": "a Spark of one's own", "pool_io": "another"},
    )
    merged = Definitions.merge(build_definitions(a), own, build_definitions(b))
    Definitions.validate_loadable(merged)
    assert keys(merged) == {
        f"kafka/{topic}",
        *(f"{path}/{topic}" for path in ("Raw_a", "Raw_b")),
        *(f"{path}/{topic}-{name}" for name in "ab" for path in (f"Staging_{name}", "kafka")),
        "report",
    }
    graph = merged.resolve_asset_graph()
    assert graph.get(AssetKey(["kafka", topic])).child_keys == {
        AssetKey(["Raw_a", topic]),
        AssetKey(["Raw_b", topic]),
    }
    executors = {job.name: job.executor_def for job in merged.resolve_all_job_defs()}
    assert executors.pop("report_job") is executors.pop("__ASSET_JOB") is multiprocess_executor
    assert set(executors) == {
        f"{job}_of_{name}"
        for name in "ab"
        for job in (Names(a).ingest_job(topic)[:-5], f"etl_and_publish_Staging_{name}")
    } | {"check_a", "check_b"}
    assert set(executors.values()) == {in_process_executor}
    ops = [node.op.name for node in graph.assets_defs if isinstance(node, AssetsDefinition) and node.is_executable]
    assert len(ops) == len(set(ops)) and all(op.endswith(("_of_a", "_of_b", "report")) for op in ops)
    assert set(merged.resources or ()) == {
        *(f"{key}_of_{name}" for name in "ab" for key in ("spark", "kafka_io", "pool_io")),
        *("spark", "pool_io"),
    }
    assert {item.name for item in merged.sensors or ()} == {"zync_a", "zync_b"}


def test_a_pipeline_of_a_shared_topic_is_whole_without_the_other(tmp_path: Path, topic: str) -> None:
    build_definitions(pipeline(tmp_path, "a", topic))
    alone = build_definitions(pipeline(tmp_path, "b", topic))
    Definitions.validate_loadable(alone)
    assert f"kafka/{topic}" in keys(alone)
    graph = alone.resolve_asset_graph()
    assert graph.get(AssetKey(["kafka", topic])).partitions_def == graph.get(AssetKey(["Raw_b", topic])).partitions_def


@pytest.mark.parametrize("prefix", ["", "b"])
def test_a_table_that_two_files_name_is_an_error_with_the_cure(tmp_path: Path, topic: str, prefix: str) -> None:
    a, b = (pipeline(tmp_path, name, topic, lake="./lake", raw="Raw") for name in "ab")
    held = build_definitions(a)
    with pytest.raises(SetupError) as caught:
        build_definitions(b, key_prefix=prefix)
    text = str(caught.value)
    assert text.startswith(f"{a.path} and {b.path} both name table Raw/{topic} of lake {tmp_path / 'lake'}")
    assert "name another pool than Raw in one of them" in text
    held = [held, build_definitions(a)]
    a.path.unlink()
    assert f"Raw/{topic}" in keys(build_definitions(b))


def refused(made: Definitions, other: Pipeline) -> str:
    """The error of building ``other`` while ``made`` is there."""
    assert made.sensors
    with pytest.raises(SetupError) as caught:
        build_definitions(other)
    return str(caught.value)


def test_two_pipelines_of_one_name_are_an_error_with_the_cure(tmp_path: Path, topic: str) -> None:
    (tmp_path / "x").mkdir()
    a, b = pipeline(tmp_path, "a", topic), pipeline(tmp_path / "x", "a", f"{topic}2")
    text = refused(build_definitions(a), b)
    assert text.startswith(f"{a.path} and {b.path} are both pipeline a, and the names of jobs")
    assert f'Write another name at the top of {b.path}, such as "name: a_2"' in text
    b.path.write_text(f"name: a_2\n{b.path.read_text().replace('Raw_a', 'Raw_b').replace('Staging_a', 'Staging_b')}")
    Definitions.validate_loadable(Definitions.merge(build_definitions(a), build_definitions(load_pipeline(b.path))))


def test_one_asset_key_of_two_tables_is_an_error_with_the_cure(tmp_path: Path, topic: str) -> None:
    a, b = (pipeline(tmp_path, name, topic, raw="Raw") for name in "ab")
    made = build_definitions(a)
    assert refused(made, b) == (
        f"{a.path} and {b.path} both make asset Raw/{topic}: the first for the table of lake {tmp_path / 'lake_a'}, the"
        f' second for the table of lake {tmp_path / "lake_b"}. Give one of them a prefix, as in key_prefix="b" of'
        " build_definitions or of defs.yaml, or leave one of the two files out of this code location."
    )
    Definitions.validate_loadable(Definitions.merge(made, build_definitions(b, key_prefix="b")))


def test_two_publishers_of_one_topic_are_an_error_that_names_no_prefix(tmp_path: Path, topic: str) -> None:
    a, other = pipeline(tmp_path, "a", topic), pipeline(tmp_path, "b", topic)
    made = build_definitions(a)
    other.path.write_text(other.path.read_text().replace(f"{topic}-b", f"{topic}-a"))
    text = refused(made, load_pipeline(other.path))
    assert text.startswith(f"{a.path} and {other.path} both publish topic {topic}-a, and a topic has one publisher")
    assert text.endswith("Name another topic in one of them, or leave one of the two files out of this code location.")


def test_one_topic_of_two_brokers_or_of_two_roles_is_an_error_with_the_cure(tmp_path: Path, topic: str) -> None:
    a, other = pipeline(tmp_path, "a", topic), pipeline(tmp_path, "b", topic)
    made = build_definitions(a)
    text = other.path.read_text()
    for edited, what in (
        (text.replace("192.0.2.1", "192.0.2.2"), (topic, "input", "192.0.2.1", "input", "192.0.2.2")),
        (text.replace(f"{topic},", f"{topic}-a,"), (f"{topic}-a", "output", "192.0.2.1", "input", "192.0.2.1")),
    ):
        other.path.write_text(edited)
        b, (name, first, brokers, second, others) = load_pipeline(other.path), what
        assert refused(made, b).startswith(
            f"{a.path} and {b.path} both make asset kafka/{name}: the first for the {first} topic {name} of brokers"
            f" {brokers}:9092, the second for the {second} topic {name} of brokers {others}:9092. Give one of them a prefix"
        )
        Definitions.validate_loadable(Definitions.merge(made, build_definitions(b, key_prefix="b")))


def test_an_edited_file_gives_its_tables_free_when_it_is_built_again(tmp_path: Path, topic: str) -> None:
    a, b = (pipeline(tmp_path, name, topic, lake="./lake", raw="Raw") for name in "ab")
    before = build_definitions(a)
    a.path.write_text(a.path.read_text().replace("pool: Raw,", "pool: Raw_a,"))
    after = build_definitions(load_pipeline(a.path))
    assert keys(before) != keys(after)
    Definitions.validate_loadable(Definitions.merge(after, build_definitions(b)))


def test_one_of_two_pipelines_of_a_topic_is_built_again_while_both_are_there(tmp_path: Path, topic: str) -> None:
    """As in a user's tests, beside the definitions of the user's code location."""
    a, b = pipeline(tmp_path, "a", topic), pipeline(tmp_path, "b", topic)
    location = Definitions.merge(build_definitions(a), build_definitions(b))
    for again in (a, b):
        Definitions.validate_loadable(build_definitions(again))
    Definitions.validate_loadable(location)
    Definitions.validate_loadable(Definitions.merge(build_definitions(a), build_definitions(b)))


def test_definitions_that_nobody_holds_are_in_the_way_of_no_other_file(tmp_path: Path, topic: str) -> None:
    """As in the tests of a user, each of which builds a copy of one file in a folder of its own."""
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        made = build_definitions(pipeline(folder, "a", topic, lake=str(tmp_path / "lake")))
        Definitions.validate_loadable(made)
        assert made.resolve_all_job_defs()
        del made


def test_key_prefix_owners_groups_and_tags_are_parameters(tmp_path: Path, topic: str) -> None:
    made = build_definitions(
        pipeline(tmp_path, "a", topic),
        key_prefix="eu/shop",
        owners=["team:sales"],
        groups={"source_topics": "in", "Raw_a": "lake"},
        tags={"tier": "gold"},
    )
    specs = {spec.key.to_user_string(): spec for spec in made.resolve_all_asset_specs()}
    assert {key: spec.group_name for key, spec in specs.items()} == {
        f"eu/shop/kafka/{topic}": "in",
        f"eu/shop/Raw_a/{topic}": "lake",
        f"eu/shop/Staging_a/{topic}-a": "Staging_a",
        f"eu/shop/kafka/{topic}-a": "output_topics",
    }
    for spec in specs.values():
        assert list(spec.owners) == ["team:sales"]
        assert spec.tags["tier"] == "gold"
        assert spec.tags["zync/pipeline"] == "a"
    one = build_definitions(pipeline(tmp_path, "a", topic), groups="shop")
    assert {spec.group_name for spec in one.resolve_all_asset_specs()} == {"shop"}
    with pytest.raises(SetupError, match=r"a\.yaml has no group raw\. Its groups are source_topics, Raw_a, Staging_a"):
        build_definitions(pipeline(tmp_path, "a", topic), groups={"raw": "lake"})


def test_a_run_of_a_job_under_its_earlier_name_counts_as_under_way(tmp_path: Path, topic: str) -> None:
    names = Names(pipeline(tmp_path, "a", topic))
    job = names.ingest_job(topic)
    assert job.endswith("_of_a")

    @asset
    def earlier() -> None: ...

    with DagsterInstance.ephemeral() as instance:
        old = Definitions(assets=[earlier], jobs=[define_asset_job(job.removesuffix("_of_a"), [earlier])])
        instance.create_run_for_job(old.resolve_job_def(job.removesuffix("_of_a")), tags={"zync/pipeline": "a"})
        assert "is not_started" in (ActiveRuns(instance).holds(job, []) or "")
        assert ActiveRuns(instance).holds(Names(pipeline(tmp_path, "b", topic)).ingest_job(topic), []) is None


@pytest.mark.slow
def test_the_page_says_what_a_run_needs_in_an_instance_of_ones_own(tmp_path: Path) -> None:
    """The run gets as far as the broker, which does not answer."""
    path = tmp_path / "shop.yaml"
    path.write_text("kafka: {bootstrap.servers: '127.0.0.1:1'}\ninputs: [{topic: orders, pool: Raw, format: json}]")
    definitions, page = build_definitions(path), (ROOT / "demo" / "dagster.md").read_text()
    code = [line.strip() for line in page.splitlines() if re.match(r" {6}(instance\.|job)", line)]
    with DagsterInstance.ephemeral(settings={"telemetry": {"enabled": False}}) as instance:
        job = definitions.resolve_job_def("ingest_orders_of_shop")
        for tags, refusal in (
            ({}, "Cannot access partition_key for a non-partitioned run"),
            ({"dagster/partition": "0:0-999999"}, "Nonexistent partition keys"),
        ):
            assert f"`{refusal}`" in page
            with pytest.raises(DagsterError, match=refusal):
                job.execute_in_process(instance=instance, tags=tags)
        with pytest.raises(Failure, match="no Kafka broker answered at 127"):
            exec("\n".join(code), {"instance": instance, "definitions": definitions})
    # The errors may hold the definitions for longer than the test. A removed file does not count as another pipeline "shop".
    path.unlink()


def test_a_pipeline_may_be_the_path_of_its_file(tmp_path: Path, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline(tmp_path, "a", topic)
    monkeypatch.chdir(tmp_path)
    made = keys(build_definitions(load_pipeline("a.yaml")))
    assert keys(build_definitions("a.yaml")) == keys(build_definitions(tmp_path / "a.yaml")) == made
    component = ZyncPipelineComponent(pipeline=tmp_path / "a.yaml")
    assert keys(component.build_defs(ComponentTree.for_test().load_context)) == made
    with pytest.raises(PipelineFileError, match=r"b\.yaml: does not exist"):
        build_definitions("b.yaml")


@pytest.mark.parametrize(
    ("name", "value", "form"),
    [
        ("kafka", RegistryResource(url="http://registry"), "a KafkaResource, not RegistryResource"),
        ("kafka", "broker:9092", "a KafkaResource, not str"),
        ("registry", KafkaResource(bootstrap_servers="broker:9092"), "a RegistryResource, not KafkaResource"),
        ("resources", [], "a mapping of names to resources, not list"),
        ("sensor_running", "yes", "True or False, not str"),
        ("key_prefix", 5, "text, or a list of texts, not int"),
        ("key_prefix", ["eu", ""], "text, or a list of texts, not list"),
        ("owners", "team:sales", r'a list of texts, such as \["team:sales"\], not str'),
        ("groups", ["sales"], "text, or a mapping of groups, not list"),
        ("tags", ["sales"], "a mapping of texts, not list"),
    ],
)
def test_an_argument_of_another_type_is_named_with_its_form(
    tmp_path: Path, topic: str, name: str, value: object, form: str
) -> None:
    arguments: dict[str, Any] = {name: value}
    with pytest.raises(SetupError, match=rf"^build_definitions: {name} must be {form}\.$"):
        build_definitions(pipeline(tmp_path, "a", topic), **arguments)


@pytest.mark.parametrize("prefix", ["north sea", ["eu", "a/b"], "été"])
def test_a_prefix_that_dagster_has_no_name_for_is_refused_with_the_letters_that_it_may_have(
    tmp_path: Path, topic: str, prefix: str | list[str]
) -> None:
    with pytest.raises(SetupError, match=r"^key_prefix: '.*' must consist of letters, digits"):
        build_definitions(pipeline(tmp_path, "a", topic), key_prefix=prefix)
