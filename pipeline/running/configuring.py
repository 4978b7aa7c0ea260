"""Where a configuration comes from: defaults, then a preset, then a file, then each --set.

Guarantees: what comes later wins, field by field; what nobody knows is an error that names the
nearest known name. Nothing that was asked for is ignored.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from pipeline.configuration import Configuration
from pipeline.configuration_codec import ConfigurationError, from_plain, nearest, yaml_mapping

PRESETS = Path(__file__).parents[2] / "algorithms" / "presets"


def build(
    preset: str | None = None, file: Path | None = None, settings: Iterable[str] = ()
) -> Configuration:
    """Build the tree; `settings` are "a.b=c" with YAML values. Raises ConfigurationError."""
    plain: dict[str, Any] = {}
    if preset is not None:
        plain = merged(plain, read_preset(preset))
    if file is not None:
        plain = merged(plain, read_file(file))
    for setting in settings:
        plain = merged(plain, parse_setting(setting))
    return from_plain(plain)


def preset_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in PRESETS.glob("*.yaml")))


def read_preset(name: str) -> dict[str, Any]:
    """The preset's differences from the defaults, as they stand in its file."""
    if name not in preset_names():
        raise ConfigurationError(f"there is no preset {name!r}{nearest(name, preset_names())}")
    return read_file(PRESETS / f"{name}.yaml")


def read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read configuration file {path}: {error}") from None
    return yaml_mapping(text, str(path))


def parse_setting(setting: str) -> dict[str, Any]:
    """ "learner.batch_size=64" as {"learner": {"batch_size": 64}}."""
    path, equals, text = setting.partition("=")
    if not equals or not all(path.split(".")):
        raise ConfigurationError(
            f"--set {setting}: should be section.field=value, such as learner.batch_size=64"
        )
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigurationError(f"--set {setting}: {text!r} is not a YAML value") from None
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`, mapping by mapping; everything else is replaced whole.

    Another algorithm's fields mean nothing to this one: where `above` names a different algorithm,
    those of `below` go.
    """
    result = dict(below)
    for key, value in above.items():
        kept = result.get(key)
        if isinstance(kept, Mapping) and isinstance(value, Mapping):
            other = key == "algorithm" and value.get("name", kept.get("name")) != kept.get("name")
            result[key] = dict(value) if other else merged(kept, value)
        else:
            result[key] = value
    return result
