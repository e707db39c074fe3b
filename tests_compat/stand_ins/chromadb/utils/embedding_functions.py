"""Part of the stand-in for chromadb."""


class OpenAIEmbeddingFunction:
    """Accepts its settings; the stand-in's collection does not embed."""

    def __init__(self, model_name: str, api_base: str, api_key: str) -> None:
        self.model_name = model_name
