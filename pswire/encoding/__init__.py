"""Protocol buffers: values of the model as messages, the table of verbs, and the protocol's number."""
