// Names the TensorFlow release that the library was compiled for, because the library loads in no
// other. tfposeidon/commands/install.py finds the text in the file without loading the library.

__attribute__((used)) static const char tfposeidon_built_for[] =
    "tfposeidon built for TensorFlow " TFPOSEIDON_TENSORFLOW;
