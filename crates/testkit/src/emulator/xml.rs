//! The XML of the S3 API, as far as its clients read it.

use super::objects::ListedObject;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::{Deserialize, Serialize};

#[derive(Serialize)]
#[serde(rename = "Error", rename_all = "PascalCase")]
struct ErrorBody<'a> {
    code: &'a str,
    message: &'a str,
}

#[derive(Serialize)]
#[serde(rename = "ListBucketResult", rename_all = "PascalCase")]
struct Listing<'a> {
    name: &'a str,
    prefix: String,
    key_count: usize,
    max_keys: usize,
    is_truncated: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    encoding_type: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    next_continuation_token: Option<&'a str>,
    contents: Vec<Contents>,
}

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct Contents {
    key: String,
    last_modified: String,
    #[serde(rename = "ETag")]
    etag: String,
    size: u64,
    storage_class: &'static str,
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

/// Returns a page of a listing. `encode` is the client's `encoding-type=url`.
pub(super) fn listing(
    bucket: &str,
    prefix: &str,
    max_keys: usize,
    page: &[ListedObject],
    next: Option<&str>,
    encode: bool,
) -> String {
    let text = |s: &str| match encode {
        true => utf8_percent_encode(s, NON_ALPHANUMERIC).to_string(),
        false => s.to_owned(),
    };
    let contents = page.iter().map(|listed| Contents {
        key: text(&listed.key),
        last_modified: humantime::format_rfc3339_millis(listed.modified).to_string(),
        etag: listed.etag.clone(),
        size: listed.size,
        storage_class: "STANDARD",
    });
    write(&Listing {
        name: bucket,
        prefix: text(prefix),
        key_count: page.len(),
        max_keys,
        is_truncated: next.is_some(),
        encoding_type: encode.then_some("url"),
        next_continuation_token: next,
        contents: contents.collect(),
    })
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
