// Names the TensorFlow release that the library was compiled for, because no other release can load
// it. tfposeidon/commands/install.py finds the text in the file without loading the library.

__attribute__((used)) static const char tfposeidon_built_for[] =
    "tfposeidon built for TensorFlow " TFPOSEIDON_TENSORFLOW;
