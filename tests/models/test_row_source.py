"""The model holds weights only: what is chosen at load lives in its row source, which mlx's functions do not see."""

import copy
import pickle

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_zip import RowStore
from mlx_zip.models.model_folder import ModelArgs
from mlx_zip.models.zip_model import Model
from support.starting import START
from support.tiny import base_ids, last_logits, tiny_config, tiny_model


def loaded():
    """A model as `load` gives it, with a store and start entries of its own."""
    model = tiny_model()
    model.eval()
    model.row_source.store = RowStore()
    model.use_pack(START)
    return model


def names(model):
    return [name for name, _ in tree_flatten(model.parameters())]


def test_a_row_source_is_in_no_tree_of_the_module():
    model, bare = loaded(), tiny_model()
    assert names(model) == names(bare)
    assert model.keys() == bare.keys()
    assert [name for name, _ in model.named_modules()] == [name for name, _ in bare.named_modules()]
    assert not any(isinstance(leaf, RowStore) for _, leaf in tree_flatten(model.state))


def test_what_a_module_holds_besides_weights_never_changes():
    """Calls, caches, stores and packs leave every attribute but the row source as it was built."""
    model = Model(ModelArgs.from_dict(tiny_config()))
    model.eval()
    before = {name: value for name, value in vars(model).items() if name != "row_source"}
    model.row_source.store = RowStore()
    model.use_pack(START)
    last_logits(model, base_ids(40), model.make_cache())
    after = {name: value for name, value in vars(model).items() if name != "row_source"}
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


def test_copies_share_store_and_pack_and_each_chooses_on_its_own():
    model = loaded()
    for twin in (copy.copy(model), copy.deepcopy(model)):
        assert twin.row_source is not model.row_source
        assert twin.row_source.store is model.row_source.store
        assert twin.make_cache()[-1].params.start == START
        twin.use_pack(())
        assert model.make_cache()[-1].params.start == START


def test_a_pickled_model_keeps_its_start_and_leaves_the_store_behind():
    model = loaded()
    ids = base_ids(30)
    expected = last_logits(model, ids, model.make_cache())
    twin = pickle.loads(pickle.dumps(model))
    assert twin.row_source.store is None
    np.testing.assert_allclose(last_logits(twin, ids, twin.make_cache()), expected, atol=1e-5)


def test_quantizing_and_casting_keep_the_row_source():
    model = loaded()
    store = model.row_source.store
    nn.quantize(model, group_size=32, bits=8, class_predicate=lambda path, module: path == "lm_head")
    model.set_dtype(mx.float32)
    model.load_weights(list(tree_flatten(model.parameters())))
    assert model.row_source.store is store
    assert model.make_cache()[-1].params.start == START
