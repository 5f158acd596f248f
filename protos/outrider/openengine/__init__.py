"""Generated code of `third_party/openengine/v1/openengine.proto`."""
