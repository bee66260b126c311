"""Embeddings: looks up rows of a variable by their ids, and bags of rows; each result computes the gradient by rows.

    rows = ps.nn.embedding_lookup(table, ids)                        # in the function given to strategy.run
    loss, d = forward_and_backward(rows.values, rows.inverse)        # d: the gradient by rows.values
    optimizer.apply_gradients([(rows.gradient(d), table)])

Names and results are those of `tf.nn`. There is no automatic differentiation: `gradient` turns the gradient with
respect to the looked-up values into the gradient of the variable.

embedding      the lookups
bags           sums and means of bags of rows
clipping       rows no longer than a norm
id_bags        ids by example, as they are given
segments       sums of rows by group
sparse_tensor  the class `SparseTensor`
"""

from psclient.nn.bags import Bags
from psclient.nn.embedding import embedding_lookup, embedding_lookup_sparse, safe_embedding_lookup_sparse

__all__ = ["Bags", "embedding_lookup", "embedding_lookup_sparse", "safe_embedding_lookup_sparse"]
