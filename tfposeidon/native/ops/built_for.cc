// Names the TensorFlow that the library was compiled for, as it loads in no other. Python finds the
// text in the file without loading it (tfposeidon/commands/install.py).

__attribute__((used)) static const char tfposeidon_built_for[] =
    "tfposeidon built for TensorFlow " TFPOSEIDON_TENSORFLOW;
