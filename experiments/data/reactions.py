"""Read chemical reactions from patents in the format of SMILES models.

The package orderly contains reactions from eight months of United States patents as files of the Open Reaction Database. rdkit
converts them to the format of the models' training data (`process_reaction` of rxnfp). Molecules are canonical and without atom
numbers, and reactants and reagents are sorted. Each month belongs to one share, so no patent is in two shares.
"""

import gzip
import random
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_posenc.progress import ProgressBar

FOLDER = "data/test_data/ord_test_data"
EVALUATION = ("cb0fdfa937234c78b020ec878a93b94c", "cb9f452f8418479ab5fd99c835dbe015")
"""The months for evaluation."""
CALIBRATION = ("0bb2e99daa66408fb8dbd6a0781d241c",)
FIELD = re.compile(rb"\x1a([\x80-\xff]?[\x00-\x7f])")
"""Matches field number 3 of a Protocol Buffers message, and its length (a varint)."""
REACTION = re.compile(r"[^\s>]+>[^\s>]*>[^\s>]+")
TOKEN = (
    r"(\%\([0-9]{3}\)|\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\||\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"
)
"""SMI_REGEX_PATTERN of rxnfp/tokenization.py and rxnmapper/smiles_utils.py (MIT). Text that doesn't match is dropped."""


def tokenizer(vocabulary: Path) -> PreTrainedTokenizerFast:
    """The SmilesTokenizer of rxnfp and rxnmapper, [CLS] … [SEP], from a file with one token per line."""
    numbers = {token: number for number, token in enumerate(vocabulary.read_text(encoding="utf-8").splitlines())}
    made = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(TOKEN), behavior="removed", invert=True)
    made.post_processor = processors.BertProcessing(("[SEP]", numbers["[SEP]"]), ("[CLS]", numbers["[CLS]"]))
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=512, **special)


def split(package: Path, length: int, **counts: int) -> dict[str, list[str]]:
    """Reactions of at most `length` tokens for "calibration", "training", and "evaluation", from different patents.

    `counts`: number of reactions per share. No reaction is in two shares. The random selection is always the same.
    """
    months: dict[str, list[Path]] = {share: [] for share in ("evaluation", "calibration", "training")}
    for file in sorted((package / FOLDER).rglob("*.pb.gz")):
        name = file.name.removeprefix("ord_dataset-").removesuffix(".pb.gz")
        months["evaluation" if name in EVALUATION else "calibration" if name in CALIBRATION else "training"].append(file)
    seen: set[str] = set()
    chosen: dict[str, list[str]] = {}
    for share, files in months.items():
        raw = sorted({each for file in files for each in raw_reactions(file)})
        random.Random(0).shuffle(raw)
        kept: list[str] = []
        with ProgressBar(total=counts[share], desc=f"reactions for {share}", leave=False) as bar:
            for each in raw:
                reaction = canonical(each)
                if reaction and reaction not in seen and len(re.findall(TOKEN, reaction)) + 2 <= length:
                    seen.add(reaction)
                    kept.append(reaction)
                    bar.update()
                if len(kept) == counts[share]:
                    break
        chosen[share] = kept
    return chosen


def raw_reactions(file: Path) -> Iterator[str]:
    """The reaction SMILES in a dataset of the Open Reaction Database, with atom numbers."""
    content = gzip.decompress(file.read_bytes())
    for found in FIELD.finditer(content):
        low, high = found[1][0], found[1][1:]
        size = low & 127 | (high[0] << 7 if high else 0)
        value = content[found.end() : found.end() + size]
        if value.isascii() and REACTION.fullmatch(text := value.decode("ascii").partition(" |")[0]):
            yield text


def canonical(reaction: str) -> str | None:
    """Precursors and products in canonical SMILES without atom numbers. None if rdkit can't read a molecule."""
    from rdkit import Chem, RDLogger

    RDLogger.DisableLog("rdApp.*")  # type: ignore[attr-defined]
    sides = []
    reactants, reagents, products = reaction.split(">")
    for side in (".".join(filter(None, (reactants, reagents))), products):
        molecules = [Chem.MolFromSmiles(each) for each in side.split(".")]
        if not all(molecules):
            return None
        for molecule in molecules:
            for atom in molecule.GetAtoms():
                atom.ClearProp("molAtomMapNumber")
        sides.append(".".join(sorted(Chem.MolToSmiles(molecule) for molecule in molecules)))
    return ">>".join(sides)
