"""Types that agents can see: what workers say of the types of tasks that they take, and what is held to it.

A worker declares a type with its claim, or by declare_type.  Then a payload or a result that does not fit its schema is
refused, list_types tells agents what there is, and over MCP each declared type can be a tool of its own.
"""
