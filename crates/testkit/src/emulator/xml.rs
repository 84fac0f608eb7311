//! The XML of the S3 API, as far as its clients read it. `listing.rs` has the listings.

use serde::{Deserialize, Serialize};

#[derive(Serialize)]
#[serde(rename = "Error", rename_all = "PascalCase")]
struct ErrorBody<'a> {
    code: &'a str,
    message: &'a str,
}

#[derive(Serialize)]
#[serde(rename = "InitiateMultipartUploadResult", rename_all = "PascalCase")]
struct UploadBegun<'a> {
    bucket: &'a str,
    key: &'a str,
    upload_id: &'a str,
}

#[derive(Serialize)]
#[serde(rename = "CompleteMultipartUploadResult", rename_all = "PascalCase")]
struct UploadCompleted<'a> {
    bucket: &'a str,
    key: &'a str,
    #[serde(rename = "ETag")]
    etag: &'a str,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Parts {
    #[serde(default)]
    part: Vec<Part>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Part {
    part_number: u32,
}

fn write<T: Serialize>(value: &T) -> String {
    let body = quick_xml::se::to_string(value).expect("these structs are XML");
    format!("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n{body}")
}

pub(super) fn error(code: &str, message: &str) -> String {
    write(&ErrorBody { code, message })
}

pub(super) fn upload_begun(bucket: &str, key: &str, upload_id: &str) -> String {
    write(&UploadBegun { bucket, key, upload_id })
}

pub(super) fn upload_completed(bucket: &str, key: &str, etag: &str) -> String {
    write(&UploadCompleted { bucket, key, etag })
}

/// Parses the numbers of an upload's parts, in the order in which they are joined.
pub(super) fn parts(text: &str) -> Option<Vec<u32>> {
    let parts: Parts = quick_xml::de::from_str(text).ok()?;
    Some(parts.part.iter().map(|p| p.part_number).collect())
}
