"""Record what compression does, bucket by bucket and step by step."""
