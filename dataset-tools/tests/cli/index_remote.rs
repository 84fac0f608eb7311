//! Datasets in a bucket.
