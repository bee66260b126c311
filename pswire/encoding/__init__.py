"""Protocol buffers: values of the model as messages, and the table of verbs."""
