"""The networks: decoder and hyper-encoders, from the files of a model's folder to their passes on a device."""
