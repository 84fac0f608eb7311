//! Signatures of S3 requests, version 4: in the `Authorization` header, or in the query of a presigned URL.
//!
//! ```text
//! canonical request = method, path, query, signed headers, their names, hash of the body
//! text to sign      = AWS4-HMAC-SHA256, time, scope (day/region/s3/aws4_request), SHA-256 of the above
//! key               = HMAC(HMAC(HMAC(HMAC("AWS4" + secret, day), region), "s3"), "aws4_request")
//! signature         = HMAC(key, text to sign)
//! ```
//! Source: "Authenticating Requests (AWS Signature Version 4)" in the reference of S3's API.
//!
//! Invariants:
//! 1. The signature is compared in constant time.
//! 2. What a request asks for is covered by its signature: method, path, query, host and time.

use super::{
    error::{S3Code, S3Error, S3Result},
    query::{Query, canonical_path},
};
use crate::tenancy::auth::S3Secret;
use aws_lc_rs::{digest, hmac};
use axum::http::{HeaderMap, Method, header};
use fletch_tables::documents::unix_ns;

const ALGORITHM: &str = "AWS4-HMAC-SHA256";
const TERMINATOR: &str = "aws4_request";
/// The header with the time of a request.
const DATE: &str = "x-amz-date";
/// The header with the hash of the body, which the client computed.
const BODY_HASH: &str = "x-amz-content-sha256";
/// What stands for the hash of the body of a presigned request.
const UNSIGNED: &str = "UNSIGNED-PAYLOAD";
/// The header and the parameter of temporary credentials, which this door does not give.
const SECURITY_TOKEN: &str = "x-amz-security-token";
/// How far the clocks of client and server may differ, in seconds.
const SKEW_MAX_S: u64 = 15 * 60;
/// The longest life of a presigned URL, in seconds.
const EXPIRES_MAX_S: u64 = 7 * 24 * 3600;
/// The most headers that a request may sign.
const SIGNED_HEADERS_MAX: usize = 64;

/// The parts of a request that its signature covers.
#[derive(Debug, Clone, Copy)]
pub struct SignedRequest<'a> {
    pub method: &'a Method,
    /// The path, decoded.
    pub path: &'a str,
    pub query: &'a Query,
    pub headers: &'a HeaderMap,
}

/// A signature as a request states it. It was not checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// The access key id.
    pub id: String,
    day: String,
    region: String,
    /// `YYYYMMDDTHHMMSSZ`.
    time: String,
    time_s: u64,
    signed_headers: String,
    signature: Vec<u8>,
    /// The life of a presigned URL, in seconds. `None`: the header has the signature.
    expires_s: Option<u64>,
}

impl Claim {
    /// Reads the signature of a request; `None` if it has none.
    ///
    /// # Errors
    /// The refusal of a signature that cannot be read or is of another kind.
    pub fn read(request: &SignedRequest<'_>) -> S3Result<Option<Self>> {
        if request.headers.contains_key(SECURITY_TOKEN) || request.query.has("X-Amz-Security-Token") {
            let why = "the server gives no session tokens: unset AWS_SESSION_TOKEN";
            return Err(S3Error::new(S3Code::InvalidToken, why));
        }
        if request.query.has("AWSAccessKeyId") {
            let why = "presigned URLs need signature version 4: for boto3, \
                Config(signature_version=\"s3v4\")";
            return Err(S3Error::new(S3Code::InvalidRequest, why));
        }
        if request.query.has("X-Amz-Algorithm") || request.query.has("X-Amz-Signature") {
            return Claim::of_query(request.query).map(Some);
        }
        match request.headers.get(header::AUTHORIZATION) {
            None => Ok(None),
            Some(value) => Claim::of_header(value.to_str().unwrap_or_default(), request.headers).map(Some),
        }
    }

    fn of_header(value: &str, headers: &HeaderMap) -> S3Result<Self> {
        let malformed = |why| S3Error::new(S3Code::AuthorizationHeaderMalformed, why);
        let Some(rest) = value.strip_prefix(ALGORITHM).filter(|rest| rest.starts_with([' ', '\t'])) else {
            let why = "the authorization mechanism is not supported: use AWS4-HMAC-SHA256";
            return Err(S3Error::new(S3Code::InvalidRequest, why));
        };
        let field = |name: &str| {
            let mut fields = rest.split(',').map(str::trim);
            fields.find_map(|field| field.strip_prefix(name)?.strip_prefix('='))
        };
        let credential = field("Credential").ok_or_else(|| malformed("there is no Credential"))?;
        let signed = field("SignedHeaders").ok_or_else(|| malformed("there is no SignedHeaders"))?;
        let signature = field("Signature").ok_or_else(|| malformed("there is no Signature"))?;
        let time = headers.get(DATE).and_then(|time| time.to_str().ok()).ok_or_else(|| {
            S3Error::new(S3Code::AccessDenied, "a signed request needs a valid x-amz-date header")
        })?;
        if !headers.contains_key(BODY_HASH) {
            let why = "the required header x-amz-content-sha256 is missing";
            return Err(S3Error::new(S3Code::InvalidRequest, why));
        }
        Claim::of((credential, signed, signature), time, None).map_err(malformed)
    }

    fn of_query(query: &Query) -> S3Result<Self> {
        let malformed = |why| S3Error::new(S3Code::AuthorizationQueryParametersError, why);
        let field = |name| query.get(name).ok_or_else(|| malformed("an X-Amz- parameter is missing"));
        if field("X-Amz-Algorithm")? != ALGORITHM {
            return Err(malformed("X-Amz-Algorithm only supports AWS4-HMAC-SHA256"));
        }
        let expires = field("X-Amz-Expires")?.parse().ok().filter(|s| (1..=EXPIRES_MAX_S).contains(s));
        let expires =
            expires.ok_or_else(|| malformed("X-Amz-Expires must be within 1 and 604800 seconds"))?;
        let fields = (field("X-Amz-Credential")?, field("X-Amz-SignedHeaders")?, field("X-Amz-Signature")?);
        Claim::of(fields, field("X-Amz-Date")?, Some(expires)).map_err(malformed)
    }

    fn of(
        (credential, signed, signature): (&str, &str, &str),
        time: &str,
        expires_s: Option<u64>,
    ) -> Result<Self, &'static str> {
        let [id, day, region, service, end] = credential.split('/').collect::<Vec<_>>()[..] else {
            return Err("the credential is not ID/YYYYMMDD/REGION/s3/aws4_request");
        };
        if id.is_empty() || service != "s3" || end != TERMINATOR {
            return Err("the credential is not ID/YYYYMMDD/REGION/s3/aws4_request");
        }
        let time_s = seconds(time).ok_or("the date is not YYYYMMDDTHHMMSSZ")?;
        if !time.starts_with(day) || day.len() != 8 {
            return Err("the day of the credential is not that of the request");
        }
        let names: Vec<&str> = signed.split(';').collect();
        if !names.contains(&"host") {
            return Err("the header host is not signed");
        }
        if names.len() > SIGNED_HEADERS_MAX {
            return Err("too many headers are signed");
        }
        let signature = hex::decode(signature).ok().filter(|s| s.len() == digest::SHA256_OUTPUT_LEN);
        Ok(Claim {
            id: id.to_owned(),
            day: day.to_owned(),
            region: region.to_owned(),
            time: time.to_owned(),
            time_s,
            signed_headers: signed.to_owned(),
            signature: signature.ok_or("the signature is not 64 hexadecimal digits")?,
            expires_s,
        })
    }

    /// Checks the time of the request. `now_s` is in seconds since 1970.
    ///
    /// # Errors
    /// [`S3Code::RequestTimeTooSkewed`], or [`S3Code::AccessDenied`] for a presigned URL.
    pub fn check_time(&self, now_s: u64) -> S3Result<()> {
        match self.expires_s {
            None if now_s.abs_diff(self.time_s) > SKEW_MAX_S => {
                let why = "the time of the request and that of the server differ by more than 15 minutes";
                Err(S3Error::new(S3Code::RequestTimeTooSkewed, why))
            }
            Some(_) if self.time_s > now_s + SKEW_MAX_S => {
                Err(S3Error::new(S3Code::AccessDenied, "the presigned URL is not valid yet"))
            }
            Some(expires) if now_s > self.time_s.saturating_add(expires) => {
                Err(S3Error::new(S3Code::AccessDenied, "the presigned URL has expired"))
            }
            _ => Ok(()),
        }
    }

    /// Returns whether the signature is that of the request by this secret.
    #[must_use]
    pub fn is_of(&self, request: &SignedRequest<'_>, secret: &S3Secret) -> bool {
        let Some(canonical) = self.covered(request) else { return false };
        let scope = format!("{}/{}/s3/{TERMINATOR}", self.day, self.region);
        let hash = hex::encode(digest::digest(&digest::SHA256, canonical.as_bytes()));
        let text = format!("{ALGORITHM}\n{}\n{scope}\n{hash}", self.time);
        let key = |bytes: &[u8]| hmac::Key::new(hmac::HMAC_SHA256, bytes);
        let mut signer = key(format!("AWS4{}", secret.as_str()).as_bytes());
        for part in [self.day.as_str(), self.region.as_str(), "s3", TERMINATOR] {
            signer = key(hmac::sign(&signer, part.as_bytes()).as_ref());
        }
        hmac::verify(&signer, text.as_bytes(), &self.signature).is_ok()
    }

    /// Returns the text that the signature covers; `None` if the request lacks a signed header.
    #[must_use]
    pub fn covered(&self, request: &SignedRequest<'_>) -> Option<String> {
        let mut headers = String::new();
        for name in self.signed_headers.split(';') {
            let values = request.headers.get_all(name).iter().map(|v| v.to_str().ok().map(collapsed));
            let values = values.collect::<Option<Vec<_>>>().filter(|values| !values.is_empty())?;
            headers += &format!("{name}:{}\n", values.join(","));
        }
        let body = match self.expires_s {
            Some(_) => UNSIGNED,
            None => request.headers.get(BODY_HASH)?.to_str().ok()?,
        };
        Some(format!(
            "{}\n{}\n{}\n{headers}\n{}\n{body}",
            request.method,
            canonical_path(request.path),
            request.query.canonical("X-Amz-Signature"),
            self.signed_headers,
        ))
    }
}

/// Returns the value of a header as it is signed: without spaces at the ends, and with single ones inside.
fn collapsed(value: &str) -> String {
    value.split(' ').filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

/// Returns the seconds since 1970 of `YYYYMMDDTHHMMSSZ`.
fn seconds(time: &str) -> Option<u64> {
    let digits = |range: std::ops::Range<usize>| {
        time.get(range).filter(|part| part.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let (date, of_day) = (digits(0..8)?, digits(9..15)?);
    if time.len() != 16 || !time.is_ascii() || &time[8..9] != "T" || !time.ends_with('Z') {
        return None;
    }
    let (year, month, day) = (&date[..4], &date[4..6], &date[6..]);
    let (hour, minute, second) = (&of_day[..2], &of_day[2..4], &of_day[4..]);
    Some(unix_ns(&format!("{year}-{month}-{day}T{hour}:{minute}:{second}Z"))? / 1_000_000_000)
}

#[cfg(test)]
mod tests;
