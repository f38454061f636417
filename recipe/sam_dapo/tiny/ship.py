"""`python -m recipe.sam_dapo.tiny.ship`: train the tiny model's warm start and put its weights into the package.

To be run where the task, the model or the tokenizer changed. On a processor with AVX2 and no AVX-512, the kind that
made the file, they come out bit for bit the same; others add in another order.
"""

from recipe.sam_dapo.tiny import shipped
from recipe.sam_dapo.tiny.assets import AssetSettings, draw_splits
from recipe.sam_dapo.tiny.model import build_model
from recipe.sam_dapo.tiny.tokenizer import build_tokenizer
from recipe.sam_dapo.tiny.warm_start import warm_start


def main() -> None:
    settings = AssetSettings()
    _train, validation = draw_splits(settings)
    tokenizer = build_tokenizer()
    model = build_model(settings.model, tokenizer, settings.seed)
    warm_start(model, tokenizer, settings.task, settings.warm_start, validation, settings.seed)
    made_of = shipped.fingerprint(settings.model, settings.task, settings.warm_start, validation, settings.seed)
    shipped.write(model, made_of)


if __name__ == "__main__":
    main()
