"""Read a published checkpoint folder: config.json, *.safetensors with an index, one tensor at a time.

Files are memory-mapped. Which names a model needs is the caller's business: it gets a table from models/.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "U8": np.uint8,
}
_CODES = ("_blocks", "_scales")  # ends of the names of MXFP4 tensors, which are bytes
FP8_BLOCK = 128  # rows and columns that share one weight_scale_inv
_SCALE = "_scale_inv"


@dataclass(frozen=True)
class _Stored:
    file: Path
    dtype: str  # safetensors name
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file


def read_json(path: Path) -> dict:
    """Read a JSON object. Raises ValueError with the path if it is missing or not JSON."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: file not found; a checkpoint folder as published on the Hub is wanted") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise ValueError(f"{path}: cannot be read as JSON ({e}); copy the file again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a {type(value).__name__}, wanted a JSON object")
    return value


class Checkpoint:
    """The tensors of a checkpoint folder. Weights in fp8 with 128x128 block scales read as float32.

    Raises ValueError, with every problem in one message, if a shard is missing or damaged.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ValueError(f"{self.folder}: no such folder; give the folder that holds config.json")
        self.config = read_json(self.folder / "config.json")
        self.files, claimed = self._find_files()
        self._stored: dict[str, _Stored] = {}
        problems = []
        for file in self.files:
            try:
                self._scan(file, problems)
            except (SafetensorError, OSError) as e:
                problems.append(f"{file.name}: damaged or missing ({e})")
        for name, file in claimed.items():
            if name not in self._stored and not any(file in p for p in problems):
                problems.append(f"{name}: not in {file}, where the index puts it")
        if problems:
            raise ValueError(_report(self.folder, problems, "download the named files again"))

    def _find_files(self) -> tuple[list[Path], dict[str, str]]:
        index = self.folder / "model.safetensors.index.json"
        if not index.exists():
            single = self.folder / "model.safetensors"
            if single.exists():
                return [single], {}
            raise ValueError(f"{self.folder}: neither {index.name} nor {single.name} found; weights are missing")
        claimed = read_json(index).get("weight_map")
        if not isinstance(claimed, dict) or not all(isinstance(v, str) for v in claimed.values()):
            raise ValueError(f"{index}: has no weight_map of names to files; copy the file again")
        names = sorted(set(claimed.values()))
        outside = [n for n in names if Path(n).name != n]
        if outside:
            raise ValueError(f"{index}: names files outside its folder: {', '.join(outside)}; refusing to read them")
        return [self.folder / n for n in names], claimed

    def _scan(self, file: Path, problems: list[str]) -> None:
        with safe_open(file, "numpy"):  # checks header and size
            pass
        with file.open("rb") as f:
            length = struct.unpack("<Q", f.read(8))[0]
            header = json.loads(f.read(length))
        for name, info in header.items():
            if name == "__metadata__":
                continue
            if name in self._stored:
                problems.append(f"{name}: is in both {self._stored[name].file.name} and {file.name}")
            offset = 8 + length + info["data_offsets"][0]
            self._stored[name] = _Stored(file, info["dtype"], tuple(info["shape"]), offset)

    def validate(self, wanted: Mapping[str, tuple[int, ...]], left_out: str | None = None) -> int:
        """Compare names, shapes and dtypes with what a model needs.

        Args:
          wanted: published name -> shape.
          left_out: prefix of names that may be there and are not wanted.
        Returns: the number of tensors left out.
        Raises: ValueError that lists every missing, unknown, mis-shaped or unreadable tensor.
        """
        problems = []
        for name, shape in wanted.items():
            stored = self._stored.get(name)
            if stored is None:
                problems.append(f"{name}: missing, wanted shape {list(shape)}")
            elif stored.shape != shape:
                problems.append(f"{name}: shape {list(stored.shape)} in {stored.file.name}, wanted {list(shape)}")
            elif (stored.dtype == "U8") != name.endswith(_CODES) or stored.dtype not in _DTYPES:
                kinds = ["U8"] if name.endswith(_CODES) else [d for d in _DTYPES if d != "U8"]
                problems.append(f"{name}: dtype {stored.dtype} in {stored.file.name}, wanted one of {kinds}")
            elif stored.dtype == "F8_E4M3":
                scale, grid = self._stored.get(name + _SCALE), tuple(-(-n // FP8_BLOCK) for n in shape)
                if scale is None:
                    problems.append(f"{name}{_SCALE}: missing, the fp8 weight needs it")
                elif scale.shape != grid or scale.dtype != "F32":
                    problems.append(
                        f"{name}{_SCALE}: {scale.dtype} {list(scale.shape)}, wanted F32 {list(grid)} (128x128 blocks)"
                    )
        extra = [n for n in self._stored if n not in wanted and n.removesuffix(_SCALE) not in wanted]
        ignored = [n for n in extra if left_out and n.startswith(left_out)]
        for name in extra:
            if name not in ignored:
                problems.append(f"{name}: unknown, the model has no such tensor")
        if problems:
            raise ValueError(_report(self.folder, problems, "the files do not belong to this config.json"))
        return len(ignored)

    def read(self, name: str, part: int | None = None) -> np.ndarray:
        """Read one tensor, or one entry of its first axis: float32 if published as fp8 or float32, else its own dtype.

        Raises: ValueError naming the first NaN or Inf.
        """
        value = self._map(name, part)
        if self._stored[name].dtype == "F8_E4M3":
            value = _dequantize_fp8(value, self._map(name + _SCALE))
        finite = np.isfinite(value.astype(np.float32))
        if not finite.all():
            at = np.argwhere(~finite)[0].tolist()
            raise ValueError(
                f"{self._stored[name].file}: {name} holds {value[tuple(at)]} at {at}; the checkpoint is damaged, "
                "download the file again"
            )
        return value

    def stored_dtype(self, name: str) -> str:
        """Give the published dtype of a tensor, as safetensors names it."""
        return self._stored[name].dtype

    def _map(self, name: str, part: int | None = None) -> np.ndarray:
        s = self._stored[name]
        shape = s.shape if part is None else s.shape[1:]
        dtype = np.dtype(_DTYPES[s.dtype])
        size = int(np.prod(shape)) * dtype.itemsize
        raw = np.memmap(s.file, np.uint8, "r", s.offset + (part or 0) * size, (size,))
        return np.array(raw).view(dtype).reshape(shape)


def _dequantize_fp8(w: np.ndarray, scale: np.ndarray) -> np.ndarray:
    rows, cols = w.shape
    expanded = np.repeat(np.repeat(scale, FP8_BLOCK, 0)[:rows], FP8_BLOCK, 1)[:, :cols]
    return w.astype(np.float32) * expanded


def _report(folder: Path, problems: list[str], remedy: str) -> str:
    shown = problems[:20] + ([f"... and {len(problems) - 20} more"] if len(problems) > 20 else [])
    return f"{folder}: {len(problems)} problem(s) with the checkpoint; {remedy}:\n  " + "\n  ".join(shown)
