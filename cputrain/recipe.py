"""A training as data: the schema of a recipe, and how files and key=value settings become one."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from affinity.catalog import shipped
from affinity.errors import InputError

RECIPES = shipped(Path(__file__).parent, "recipes")

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Auto = Literal["auto"]


class Section(BaseModel):
    """A part of a recipe: frozen, and nothing in it that is not in the schema."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class ModelSection(Section):
    """The network."""

    name: Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"] = "resnet50"
    """torchvision's network of that name, with as many outputs as the data has classes."""
    bn_decay: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Share of the running statistics that a step keeps (torch's momentum is 1 - this); published: 0.95."""
    zero_gamma: Literal["none", "last_of_block"] = "none"
    """Start each residual block's last batch-norm at 0: blocks begin as identities (Goyal et al. 2017, 5.1)."""


class AugmentSection(Section):
    """What is done to a training image after its part is cut out; each is drawn anew for each image and epoch."""

    rotate: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Turned by up to this share of a full turn, either way."""
    zoom: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Scaled by a factor of up to this much above or below 1."""
    shift: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Moved by up to this share of the side, in both directions."""
    brightness: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Brightness times a factor of up to this much above or below 1."""
    contrast: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Contrast likewise."""
    saturation: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Saturation likewise."""
    lighting: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of the noise along ImageNet's principal colours (Krizhevsky et al. 2012, 4.1: 0.1)."""


class DataSection(Section):
    """The images."""

    path: str | None = None
    """A folder with train/CLASS/* and val/CLASS/*, one that `cputrain prepare` wrote, or one of TFRecords."""
    crop: Positive = 224
    """Side of the square that the network sees, in pixels."""
    resize: Positive | None = None
    """Short side before the centre crop in evaluation and plain training parts, pixels; null: crop x 256 / 224."""
    min_area: Annotated[float, Field(gt=0, le=1)] = 0.08
    """Smallest share of an image's area that a training crop covers."""
    max_aspect: Annotated[float, Field(ge=1)] = 4 / 3
    """Largest ratio of a training crop's sides before it is scaled to a square."""
    part: Literal["scale_aspect", "plain"] = "scale_aspect"
    """What a training image shows: a part of random area and aspect, or a square of the image scaled to `resize`."""
    augment: AugmentSection = AugmentSection()
    flip: bool = True
    """Mirror half of the training images, left to right."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Subtracted from the channels (red, green, blue, each 0 to 1)."""
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    """The channels are divided by this afterwards."""
    stage: str | None = None
    """A folder on each host's own disk: one worker copies the shards there while all begin to train from data.path."""
    block_mib: Annotated[float, Field(ge=0)] = 0.0
    """Shards are read in pieces of so many MiB, as parallel file systems want it; each worker keeps one for each image
    of its batch in memory. 0: every image by itself."""
    decoder: Literal["auto", "turbo", "pillow"] = "auto"
    """turbo: libjpeg-turbo 3 decodes no more of a JPEG than is needed; auto: turbo where it can be had, else Pillow."""
    on_error: Literal["skip", "raise"] = "skip"
    """What an image that cannot be decoded does: it is named, counted and left out, or it ends the training."""
    remainder: Literal["drop", "spread"] = "drop"
    """Images that fill no global batch: drop leaves them to the next epoch's permutation; spread takes one step more,
    and all of the epoch's steps are a little smaller."""
    images_per_epoch: Positive | None = None
    """How many images count as one epoch; null: all of train/."""

    @property
    def short_side(self) -> int:
        """Pixels of the short side that crops are taken from."""
        return self.resize or round(self.crop * 256 / 224)


class BatchSection(Section):
    """Images per step: global = local x workers x accumulation."""

    local: Positive = 32
    """Images per worker and backward pass."""
    accumulation: Positive = 1
    """Backward passes per step."""


class OptimSection(Section):
    """The optimizer."""

    name: Literal["momentum", "lars"] = "momentum"
    """momentum: stochastic gradient descent with momentum; lars: with a rate for each layer, by the ratio of its
    weights to its gradients (You et al. 2017)."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Share of the last update that is kept."""
    nesterov: bool = False
    """Nesterov's form of momentum."""
    weight_decay: Rate = 5e-5
    """L2 penalty on the weights."""
    decay_bn_and_bias: bool = True
    """Whether the penalty also falls on batch-norm parameters and biases."""
    family: Literal["caffe", "timm", "nus"] = "caffe"
    """Of lars, where rate and trust ratio stand: both inside the momentum (caffe: Intel Caffe, MLPerf's TensorFlow),
    the trust ratio inside (timm), both outside (nus: NUS, Intel's MLPerf PyTorch)."""
    trust: Annotated[float, Field(gt=0)] = 0.001
    """Of lars: the trust coefficient."""
    epsilon: Rate = 0.0
    """Of lars: added to the trust ratio's denominator."""
    trust_clip: bool = False
    """Of lars: no layer learns faster than the rate."""
    momentum_correction: bool = False
    """Of lars' family caffe: the momentum is scaled as the rate changes (Goyal et al. 2017, 3)."""
    adapt_bn_and_bias: bool = False
    """Of lars: whether batch-norm parameters and biases have a rate of their own too (Intel Caffe), or not (MLPerf)."""

    @model_validator(mode="after")
    def _options_are_used(self) -> "OptimSection":
        fields = ("family", "trust", "epsilon", "trust_clip", "momentum_correction", "adapt_bn_and_bias")
        idle = [field for field in fields if getattr(self, field) != type(self).model_fields[field].default]
        if self.name != "lars" and idle:
            raise ValueError(f"optim.{idle[0]} is lars' alone: set optim.name=lars, or leave it out")
        if self.momentum_correction and self.family != "caffe":
            raise ValueError("optim.momentum_correction is family caffe's alone, whose momentum holds the rate")
        return self


class ScheduleSection(Section):
    """The learning rate as a function of the step: a gradual, linear warm-up, then down."""

    name: Literal["linear", "poly", "poly_of_all", "steps", "cosine", "constant"] = "linear"
    """The way down after the warm-up: linear to the last step (the 256-node run); (1 - progress) to a power, the
    progress counted from the warm-up's end (poly, MLPerf) or from step 0 (poly_of_all, Intel Caffe); a factor at
    milestones; half a cosine; or none."""
    start_rate: Rate = 0.0
    """Learning rate of step 0."""
    peak_rate: Rate | Auto = "auto"
    """Learning rate at the end of warm-up; auto: rate_factor x 0.1 x global batch / 256 (Goyal et al. 2017, 2.1)."""
    rate_factor: Annotated[float, Field(gt=0)] = 1.0
    """What peak_rate=auto makes of the linear-scaling rule; the 256-node run halves it."""
    end_rate: Rate = 0.0
    """Learning rate after the last step, of linear, poly, poly_of_all and cosine."""
    warmup_epochs: Annotated[float, Field(ge=0)] = 5.0
    """Length of the warm-up."""
    power: Annotated[float, Field(gt=0)] = 2.0
    """Of poly and poly_of_all."""
    milestones: tuple[Annotated[float, Field(gt=0)], ...] = (30.0, 60.0, 80.0)
    """Epochs after which steps multiplies the rate by `factor`."""
    factor: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Of steps."""


class EvaluateSection(Section):
    """Exact top-1 and top-5 over the validation images."""

    every_epochs: Positive | None = 1
    """Evaluate after this many epochs; null: at the end only."""


class CheckpointSection(Section):
    """What is kept of the training state."""

    every_epochs: Positive | None = 1
    """Write one after this many epochs; null: at the end only."""
    keep: Positive = 2
    """How many of the newest to keep; the best is kept besides."""


class CommSection(Section):
    """How gradients travel."""

    backend: Literal["auto", "ccl", "gloo"] = "auto"
    """The c10d backend; auto: ccl (oneCCL) where every rank can use it, else gloo."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """How long a rank waits in a collective for the others."""
    bucket_mb: Annotated[float, Field(gt=0)] | Auto = "auto"
    """MiB of gradients sent at a time; auto: from what all-reduces take at the start."""
    compression: Literal["none", "bf16"] = "none"
    """bf16: gradients travel as bfloat16, with the rounding carried over to the next step."""


class PlanSection(Section):
    """What is asked of the planner; auto: it decides."""

    ppn: Positive | Auto = "auto"
    """Workers per host."""
    threads: Positive | Auto = "auto"
    """Intra-op threads per worker."""
    inter_op: Positive | Auto = "auto"
    """Inter-op threads per worker."""
    comm_cores: NotNegative | Auto = "auto"
    """Cores per worker kept for communication."""
    loader_cores: NotNegative | Auto = "auto"
    """Cores per worker kept for loading images."""
    smt: Literal["auto", "on", "off"] = "auto"
    """Whether second hardware threads compute; auto: off."""
    profile: Literal["auto", "bkm-2018", "mlperf-spr"] = "auto"
    """Published practice that decides what is auto here; auto: the planner's own rules."""
    balance: Literal["equal", "batch"] = "equal"
    """batch: workers of a host get their images in proportion to their cores, batch.local on average."""


class Recipe(Section):
    """Everything that decides what a training computes."""

    name: str = "training"
    """What the run is called."""
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    batch: BatchSection = BatchSection()
    optim: OptimSection = OptimSection()
    schedule: ScheduleSection = ScheduleSection()
    epochs: Positive = 90
    """Passes over the training images."""
    max_steps: Positive | None = None
    """Stop after this many steps, for trials; the schedule stays that of all epochs."""
    seed: NotNegative = 1
    """Decides initial weights, order and augmentation."""
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    comm: CommSection = CommSection()
    engine: Literal["auto", "native", "compile"] = "auto"
    """native: eager, channels-last, oneDNN; compile: torch.compile on top; auto: native."""
    plan: PlanSection = PlanSection()
    output: str = ""
    """The run's folder; empty: runs/NAME."""

    @model_validator(mode="after")
    def _warmup_ends(self) -> "Recipe":
        if self.schedule.warmup_epochs > self.epochs:
            raise ValueError(f"schedule.warmup_epochs={self.schedule.warmup_epochs:g} exceeds epochs={self.epochs}")
        return self

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.output or f"runs/{self.name}")


class _Loader(yaml.SafeLoader):
    """PyYAML with YAML 1.2's floats, so that 5e-5 is a number."""


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)[eE][-+]?\d+"), list("-+0123456789.")
)


def load_recipe(spec: str, settings: Sequence[str] = ()) -> Recipe:
    """The recipe of a file or a shipped name, with key=value settings on top.

    Raises InputError with file and line (or the setting), and the nearest key or name.
    """
    path = find_recipe(spec)
    try:
        text = path.read_text()
        tree = yaml.compose(text, Loader=_Loader)
        values = yaml.load(text, Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read recipe {path}: {error}") from None
    except yaml.YAMLError as error:
        raise InputError(f"recipe {path} is not YAML: {' '.join(str(error).split())}") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise InputError(f"recipe {path}:1 holds no keys: a recipe is key: value lines")
    given: dict[tuple[str, ...], str] = {}
    for setting in settings:
        keys, value = parse_setting(setting)
        put(values, keys, value, setting)
        given[keys] = setting
    try:
        return Recipe.model_validate(tuples(values))
    except ValidationError as error:
        raise InputError(_complaint(error, path, tree, given)) from None


def find_recipe(spec: str) -> Path:
    """A recipe's file, by path or by shipped name. Raises InputError with the nearest names."""
    path = Path(spec)
    if path.suffix in (".yaml", ".yml") or "/" in spec:
        if not path.is_file():
            raise InputError(f"recipe {spec} is not there: give a file, or a name: {', '.join(recipe_names())}")
        return path
    if spec not in recipe_names():
        near = get_close_matches(spec, recipe_names(), n=3, cutoff=0.3) or recipe_names()
        raise InputError(f"recipe {spec!r} is not known: nearest are {', '.join(near)}; or give a .yaml file")
    return RECIPES / f"{spec}.yaml"


def recipe_names() -> list[str]:
    """The shipped recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML that `load_recipe` reads back to the same value."""
    return str(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """The recipe, to be read from any folder."""
    paths = {"path": recipe.data.path, "stage": recipe.data.stage}
    known = {name: None if path is None else str(Path(path).absolute()) for name, path in paths.items()}
    data = recipe.data.model_copy(update=known)
    return recipe.model_copy(update={"data": data, "output": str(recipe.folder.absolute())})


def parse_setting(setting: str) -> tuple[tuple[str, ...], Any]:
    """ "batch.local=16" -> (("batch", "local"), 16)."""
    key, equals, text = setting.partition("=")
    if not equals or not all(key.split(".")):
        raise InputError(f"setting {setting!r} is not key=value, as in batch.local=16")
    try:
        return tuple(key.split(".")), yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return tuple(key.split(".")), text  # a path with a colon or a quote in it: taken as it stands


def put(values: dict[str, Any], keys: tuple[str, ...], value: Any, setting: str) -> None:
    """Set a nested key in place. Raises InputError where the path runs through a value."""
    for key in keys[:-1]:
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            raise InputError(f"setting {setting!r}: {key} is a value, not a section")
    values[keys[-1]] = value


def tuples(value: Any) -> Any:
    """YAML's lists as tuples, which strict validation wants."""
    if isinstance(value, dict):
        return {key: tuples(item) for key, item in value.items()}
    return tuple(tuples(item) for item in value) if isinstance(value, list) else value


def _complaint(error: ValidationError, path: Path, tree: yaml.Node | None, given: dict[tuple[str, ...], str]) -> str:
    """The first thing that is wrong with a recipe, in one line."""
    first = error.errors()[0]
    keys = _known_path(first["loc"])
    dotted = ".".join(keys)
    setting = next((text for path_, text in given.items() if path_[: len(keys)] == keys), None)
    where = f"setting {setting!r}" if setting else f"{path}:{_line(tree, keys)}"
    if first["type"] == "extra_forbidden":
        siblings = _fields(keys[:-1])
        near = get_close_matches(keys[-1], siblings, n=1, cutoff=0.5)
        advice = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(siblings)}"
        return f"{where}: unknown key {dotted!r}: {advice}"
    same = (e["msg"].removeprefix("Value error, ") for e in error.errors() if _known_path(e["loc"]) == keys)
    reasons = "; or ".join(dict.fromkeys(same))
    return f"{where}: {dotted}={first['input']!r}: {reasons}" if dotted else f"{where}: {reasons}"


def _known_path(location: Iterable[int | str]) -> tuple[str, ...]:
    """The keys of an error's location, without what pydantic adds below a value (union members, tuple indices)."""
    keys: tuple[str, ...] = ()
    for part in location:
        fields = _fields(keys)
        if not fields:
            break
        keys += (str(part),)
        if part not in fields:
            break
    return keys


def _fields(keys: tuple[str, ...]) -> tuple[str, ...]:
    """The fields of the section at this path; none where the path leads to a value."""
    section: Any = Recipe
    for key in keys:
        section = section.model_fields[key].annotation
        if not (isinstance(section, type) and issubclass(section, Section)):
            return ()
    return tuple(section.model_fields)


def _line(tree: yaml.Node | None, keys: tuple[str, ...]) -> int:
    """The line of a key in the file; that of the nearest key above it where the file does not have it."""
    line = 1
    node = tree
    for key in keys:
        if not isinstance(node, yaml.MappingNode):
            break
        found = next(((k, v) for k, v in node.value if k.value == key), None)
        if found is None:
            break
        line, node = found[0].start_mark.line + 1, found[1]
    return line
