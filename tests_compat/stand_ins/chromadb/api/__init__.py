"""Part of the stand-in for chromadb."""
