//! The errors of the S3 door: the one place where an error of another room becomes a code of S3.

use super::xml;
use crate::{data::versions::VersionError, http::error::ApiError};
use axum::{
    body::Body,
    http::{HeaderValue, StatusCode, header},
    response::Response,
};
use fletch_api::Code;
use fletch_core::Kind;
use std::borrow::Cow;

/// The result of an operation.
pub type S3Result<T = Response> = Result<T, S3Error>;

macro_rules! codes {
    ($($name:ident = $status:ident;)*) => {
        /// A code of S3's API. Its name is the word that clients get.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum S3Code { $($name),* }

        impl S3Code {
            /// Returns the word.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(S3Code::$name => stringify!($name)),* }
            }

            /// Returns the status.
            #[must_use]
            pub fn status(self) -> StatusCode {
                match self { $(S3Code::$name => StatusCode::$status),* }
            }
        }
    };
}

codes! {
    AccessDenied = FORBIDDEN;
    AuthorizationHeaderMalformed = BAD_REQUEST;
    AuthorizationQueryParametersError = BAD_REQUEST;
    EntityTooLarge = BAD_REQUEST;
    ExpiredToken = FORBIDDEN;
    InternalError = INTERNAL_SERVER_ERROR;
    InvalidAccessKeyId = FORBIDDEN;
    InvalidArgument = BAD_REQUEST;
    InvalidPartNumber = RANGE_NOT_SATISFIABLE;
    InvalidRange = RANGE_NOT_SATISFIABLE;
    InvalidRequest = BAD_REQUEST;
    InvalidToken = BAD_REQUEST;
    InvalidURI = BAD_REQUEST;
    MethodNotAllowed = METHOD_NOT_ALLOWED;
    NoSuchBucket = NOT_FOUND;
    NoSuchKey = NOT_FOUND;
    NotImplemented = NOT_IMPLEMENTED;
    PreconditionFailed = PRECONDITION_FAILED;
    RequestHeaderSectionTooLarge = BAD_REQUEST;
    RequestTimeTooSkewed = FORBIDDEN;
    ServiceUnavailable = SERVICE_UNAVAILABLE;
    SignatureDoesNotMatch = FORBIDDEN;
    SlowDown = SERVICE_UNAVAILABLE;
}

/// The error of an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct S3Error {
    /// The code.
    pub code: S3Code,
    /// What is wrong, for people.
    pub message: Cow<'static, str>,
    /// The length of the object whose bytes a range does not reach.
    length: Option<u64>,
}

impl S3Error {
    /// Creates an error.
    pub fn new(code: S3Code, message: impl Into<Cow<'static, str>>) -> Self {
        S3Error { code, message: message.into(), length: None }
    }

    /// Returns the one error for a key that is absent, and for what belongs to another domain (I7).
    pub fn no_such_key() -> Self {
        S3Error::new(S3Code::NoSuchKey, "the specified key does not exist")
    }

    /// Adds the length of the object to an error about a range of it.
    #[must_use]
    pub fn of_length(self, length: u64) -> Self {
        S3Error { length: Some(length), ..self }
    }

    /// Returns the reply: XML, or for `HEAD` the status alone.
    pub fn into_response(self, resource: &str, request_id: &str, is_head: bool) -> Response {
        let status = self.code.status();
        if status.is_server_error() {
            let code = self.code.as_str();
            tracing::warn!(code, detail = %self.message, "a request of the S3 door failed");
        }
        let body = if is_head { Vec::new() } else { self.document(resource, request_id) };
        let mut response = Response::new(Body::from(body));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(xml::TYPE));
        if let Some(length) = self.length
            && let Ok(value) = HeaderValue::try_from(format!("bytes */{length}"))
        {
            headers.insert(header::CONTENT_RANGE, value);
        }
        if self.code == S3Code::SlowDown {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }

    fn document(&self, resource: &str, request_id: &str) -> Vec<u8> {
        let mut out = xml::Document::new("Error", false);
        out.text("Code", self.code.as_str());
        out.lossy("Message", &self.message);
        if let Some(length) = self.length {
            // By this element, AWS's C library knows an empty object, which has no range.
            out.text("ActualObjectSize", &length.to_string());
        }
        out.lossy("Resource", resource);
        out.lossy("RequestId", request_id);
        out.end()
    }
}

impl From<ApiError> for S3Error {
    fn from(e: ApiError) -> Self {
        let code = match e.code() {
            Code::NotFound | Code::NotIndexed => return S3Error::no_such_key(),
            Code::Unauthorized => S3Code::InvalidAccessKeyId,
            Code::RangeNotSatisfiable => S3Code::InvalidRange,
            Code::HeaderTooLarge => S3Code::RequestHeaderSectionTooLarge,
            Code::BadRequest => S3Code::InvalidRequest,
            Code::Overloaded => S3Code::SlowDown,
            code => match code.kind() {
                Kind::Internal => S3Code::InternalError,
                // Clients repeat a request after a 503 only, so it stands for every failure of an origin.
                Kind::Unavailable | Kind::Overloaded | Kind::Corrupt => S3Code::ServiceUnavailable,
                Kind::NotFound | Kind::Invalid => S3Code::AccessDenied,
            },
        };
        S3Error::new(code, format!("{}; {}", e.0.detail, e.0.hint))
    }
}

impl From<VersionError> for S3Error {
    fn from(e: VersionError) -> Self {
        ApiError::from(e).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_a_document_with_four_parts() {
        let error = S3Error::new(S3Code::InvalidRange, "past <the> end").of_length(0);
        let text = String::from_utf8(error.document("/fletch/d/a&b", "17")).expect("UTF-8");
        let want = "<Error><Code>InvalidRange</Code><Message>past &lt;the&gt; end</Message>\
            <ActualObjectSize>0</ActualObjectSize><Resource>/fletch/d/a&amp;b</Resource>\
            <RequestId>17</RequestId></Error>";
        assert!(text.ends_with(want), "{text}");
        let reply = error.into_response("/", "17", true);
        assert_eq!(reply.status(), StatusCode::RANGE_NOT_SATISFIABLE);
        assert_eq!(reply.headers()[header::CONTENT_RANGE], "bytes */0");
    }

    #[test]
    fn errors_of_other_rooms_have_a_status_that_clients_understand() {
        let of = |code: Code| {
            let error = S3Error::from(ApiError::new(code, "detail", "hint"));
            (error.code, error.code.status().as_u16())
        };
        assert_eq!(of(Code::NotFound), (S3Code::NoSuchKey, 404));
        assert_eq!(of(Code::NotIndexed), (S3Code::NoSuchKey, 404));
        assert_eq!(of(Code::Overloaded), (S3Code::SlowDown, 503));
        for failure in [Code::OriginChanged, Code::OriginUnavailable, Code::TablesCorrupt, Code::NotReady] {
            assert_eq!(of(failure), (S3Code::ServiceUnavailable, 503), "{failure:?}");
        }
        assert_eq!(of(Code::Unauthorized), (S3Code::InvalidAccessKeyId, 403));
        assert_eq!(of(Code::Misdirected), (S3Code::AccessDenied, 403));
        assert_eq!(of(Code::Internal), (S3Code::InternalError, 500));
    }
}
