"""Rebuild the tokenizer of the packaged tiny model: byte-level BPE, 1,024 entries, trained on this project's source.

.venv-engine/bin/python scripts/make_tokenizer.py   (it needs the `tokenizers` package, which vLLM brings)
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "prober" / "models" / "tiny-llama"
VOCABULARY = 1024


def main() -> None:
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "prober").glob("*.py"))]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=VOCABULARY, special_tokens=["<unk>", "<s>", "</s>"])
    tokenizer.save(str(FOLDER / "tokenizer.json"))
    print(f"{tokenizer.get_vocab_size()} entries in {FOLDER / 'tokenizer.json'}")


if __name__ == "__main__":
    main()
