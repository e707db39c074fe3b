"""The public test kit: scripted and faulty models, and a tokenizer to test with.

It may import any room and is imported by none.
"""

from rolltree.testing.tokenizer import CHATML_TEMPLATE, SPECIAL_TOKENS, ByteTokenizer

__all__ = ["CHATML_TEMPLATE", "SPECIAL_TOKENS", "ByteTokenizer"]
