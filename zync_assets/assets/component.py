"""A pipeline as a component of a ``dg`` project: ``defs.yaml`` names the pipeline file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from dagster import (
    Component,
    ComponentLoadContext,
    Definitions,
    Model,
    Resolvable,
    Resolver,
    Scaffolder,
    ScaffoldRequest,
    scaffold_component,
    scaffold_with,
)
from pydantic import Field

from zync_assets.assets.build import build_definitions
from zync_assets.pipeline_file.loader import load_pipeline

STARTER = """# A pipeline of zync_assets. `zync help` shows every key of a file.
kafka: {{bootstrap.servers: "${{KAFKA_BOOTSTRAP_SERVERS:-localhost:9092}}"}}
# A folder or an object store's URI, outside this Python package: a package that is built or moved takes no lake with it.
lake: ${{ZYNC_LAKE:-~/.zync/lakes}}/{name}
inputs:
  - {{topic: orders, pool: Raw, format: json}}
"""
"""``dg scaffold defs`` writes this pipeline file. It ingests one topic. ``name``: the pipeline's, for a lake of its own."""


class ZyncPipelineScaffolder(Scaffolder):
    """Makes ``defs.yaml`` and a first pipeline file, named as the folder. The asset keys begin with the name, because several
    starters may read one topic."""

    def scaffold(self, request: ScaffoldRequest[Any]) -> None:
        name = request.target_path.stem
        file = (request.target_path.parent if request.append else request.target_path) / f"{name}.yaml"
        if not file.exists():
            file.write_text(STARTER.format(name=name))
        scaffold_component(request, {"pipeline": file.name, "key_prefix": name})


@scaffold_with(ZyncPipelineScaffolder)
class ZyncPipelineComponent(Component, Model, Resolvable):
    """A pipeline of zync_assets in a ``dg`` project. ``defs.yaml`` says where the pipeline file is.

    >>> from pathlib import Path
    >>> from dagster import ComponentTree
    >>> from zync_assets import ZyncPipelineComponent
    >>> _ = Path("shop.yaml").write_text("inputs: [{topic: orders, pool: Raw, format: json}]")
    >>> defs_yaml = {"pipeline": str(Path("shop.yaml").resolve()), "key_prefix": "shop", "owners": ["team:sales"]}
    >>> component = ZyncPipelineComponent.from_attributes_dict(attributes=defs_yaml)
    >>> defs = component.build_defs(ComponentTree.for_test().load_context)
    >>> sorted(key.to_user_string() for key in defs.resolve_all_asset_keys())
    ['shop/Raw/orders', 'shop/kafka/orders']
    """

    pipeline: Annotated[str | Path, Resolver.default(model_field_type=str)] = Field(
        description="The pipeline file; a relative path begins at the folder of defs.yaml."
    )
    key_prefix: str | Sequence[str] = Field(
        default=(), description="The first parts of every asset key: a list, or a string with slashes."
    )
    owners: Sequence[str] = Field(default=(), description="The owners of every asset, such as team:sales.")
    groups: str | Mapping[str, str] = Field(
        default={},
        description="One group for all assets, or a mapping from source_topics, output_topics and pools to groups.",
    )
    tags: Mapping[str, str] = Field(default={}, description="Tags of every asset.")
    sensor_running: bool = Field(default=False, description="Whether the sensor is on from the start.")

    def build_defs(self, context: ComponentLoadContext) -> Definitions:
        folder = context.path if context.path.is_dir() else context.path.parent
        return build_definitions(
            load_pipeline(folder / Path(self.pipeline).expanduser()),
            key_prefix=self.key_prefix,
            owners=self.owners,
            groups=self.groups,
            tags=self.tags,
            sensor_running=self.sensor_running,
        )
