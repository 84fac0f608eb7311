//! Which operation of S3's API a request asks for.

use super::{
    error::{S3Code, S3Error, S3Result},
    query::Query,
};
use axum::http::Method;

/// What a request names: everything, the bucket, or a key of the bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation<'a> {
    ListBuckets,
    HeadBucket,
    GetBucketLocation,
    ListObjects,
    ListObjectsV2,
    HeadObject { key: &'a str },
    GetObject { key: &'a str },
}

/// Parameters of a bucket that make a request one of another operation.
const OTHERS_OF_BUCKET: &[&str] = &[
    "accelerate",
    "acl",
    "analytics",
    "cors",
    "encryption",
    "intelligent-tiering",
    "inventory",
    "lifecycle",
    "logging",
    "metrics",
    "notification",
    "object-lock",
    "ownershipControls",
    "policy",
    "policyStatus",
    "publicAccessBlock",
    "replication",
    "requestPayment",
    "session",
    "tagging",
    "uploads",
    "versioning",
    "versions",
    "website",
];
/// Parameters of a key that make a request one of another operation.
const OTHERS_OF_KEY: &[&str] = &[
    "acl",
    "attributes",
    "legal-hold",
    "restore",
    "retention",
    "tagging",
    "torrent",
    "uploadId",
    "versionId",
];

/// The name of requests that are no operation of this door, in metrics.
pub const OTHER: &str = "s3 other";

impl<'a> Operation<'a> {
    /// Reads the operation of a request. `path` is decoded, and `bucket` is the one bucket.
    ///
    /// # Errors
    /// [`S3Code::MethodNotAllowed`] for a request that would write; [`S3Code::NotImplemented`] for a read
    /// that this door does not have; [`S3Code::NoSuchBucket`].
    pub fn read(method: &Method, path: &'a str, query: &Query, bucket: &str) -> S3Result<Self> {
        let is_head = *method == Method::HEAD;
        if !is_head && *method != Method::GET {
            let why = "the S3 door only reads: the method is not allowed";
            return Err(S3Error::new(S3Code::MethodNotAllowed, why));
        }
        let path = path.strip_prefix('/').unwrap_or(path);
        let (named, key) = path.split_once('/').unwrap_or((path, ""));
        if path.is_empty() && !is_head {
            return Ok(Operation::ListBuckets);
        }
        if named != bucket {
            let why =
                format!("the only bucket is {bucket}; use path-style addressing (http://HOST/{bucket}/KEY)");
            return Err(S3Error::new(S3Code::NoSuchBucket, why));
        }
        let others = if key.is_empty() { OTHERS_OF_BUCKET } else { OTHERS_OF_KEY };
        if let Some(other) = query.names().find(|name| others.contains(name)) {
            let why = format!("the S3 door has no operation with the parameter {other}");
            return Err(S3Error::new(S3Code::NotImplemented, why));
        }
        Ok(match (key, is_head) {
            ("", true) => Operation::HeadBucket,
            ("", false) if query.has("location") => Operation::GetBucketLocation,
            ("", false) if query.get("list-type") == Some("2") => Operation::ListObjectsV2,
            ("", false) => Operation::ListObjects,
            (key, true) => Operation::HeadObject { key },
            (key, false) => Operation::GetObject { key },
        })
    }

    /// Returns the name of the operation, as metrics and logs have it.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Operation::ListBuckets => "s3 ListBuckets",
            Operation::HeadBucket => "s3 HeadBucket",
            Operation::GetBucketLocation => "s3 GetBucketLocation",
            Operation::ListObjects => "s3 ListObjects",
            Operation::ListObjectsV2 => "s3 ListObjectsV2",
            Operation::HeadObject { .. } => "s3 HeadObject",
            Operation::GetObject { .. } => "s3 GetObject",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<'a>(method: &str, path: &'a str, query: &str) -> Result<Operation<'a>, S3Code> {
        let method = method.parse().expect("a method");
        Operation::read(&method, path, &Query::read(query).expect("a query"), "fletch").map_err(|e| e.code)
    }

    #[test]
    fn requests_of_the_reading_operations() {
        assert_eq!(read("GET", "/", ""), Ok(Operation::ListBuckets));
        assert_eq!(read("HEAD", "/fletch", ""), Ok(Operation::HeadBucket));
        assert_eq!(read("GET", "/fletch", "location"), Ok(Operation::GetBucketLocation));
        assert_eq!(read("GET", "/fletch/", "prefix=a"), Ok(Operation::ListObjects));
        assert_eq!(read("GET", "/fletch", "list-type=2&x-id=ListObjectsV2"), Ok(Operation::ListObjectsV2));
        assert_eq!(read("HEAD", "/fletch/d/a", ""), Ok(Operation::HeadObject { key: "d/a" }));
        assert_eq!(read("GET", "/fletch/d//a/", "partNumber=1"), Ok(Operation::GetObject { key: "d//a/" }));
    }

    #[test]
    fn others_are_refused() {
        for method in ["PUT", "POST", "DELETE", "PATCH", "OPTIONS"] {
            assert_eq!(read(method, "/fletch/d/a", ""), Err(S3Code::MethodNotAllowed), "{method}");
        }
        for query in ["acl", "versioning", "versions&prefix=a", "uploads"] {
            assert_eq!(read("GET", "/fletch", query), Err(S3Code::NotImplemented), "{query}");
        }
        assert_eq!(read("GET", "/fletch/d/a", "tagging"), Err(S3Code::NotImplemented));
        for path in ["/other", "/other/key", "/fletc", "//", "/fletchx/"] {
            assert_eq!(read("GET", path, ""), Err(S3Code::NoSuchBucket), "{path}");
        }
        assert_eq!(read("HEAD", "/", ""), Err(S3Code::NoSuchBucket));
    }
}
