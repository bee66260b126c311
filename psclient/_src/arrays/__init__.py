"""Arrays of any library, nests of them, and the devices on which they lie.

conversions  arrays of other libraries as NumPy's, and back
devices      where arrays are, and how they come to be elsewhere
nest         lists, dicts and other structures of arrays
rows         rows of arrays, taken, joined and added up where they are
"""
