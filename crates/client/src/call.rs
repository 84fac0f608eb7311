//! One call: the request, as it is sent to whichever server is asked.

use crate::route::Subject;
use bytes::Bytes;
use fletch_api::headers;
use fletch_core::Hash;
use http::{HeaderName, HeaderValue, Method, header};

/// A request that can be sent again, and to another server.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub method: Method,
    /// The path with its query.
    pub path: String,
    pub headers: Vec<(HeaderName, HeaderValue)>,
    pub body: Option<Bytes>,
    pub subject: Subject,
    /// Whether an answer that comes late does not count ([`crate::term`]), so that the call is made again.
    pub must_be_in_time: bool,
    /// The id of the request, the same for each attempt.
    pub id: u64,
}

impl Call {
    pub fn new(method: Method, path: impl Into<String>) -> Self {
        Call {
            method,
            path: path.into(),
            headers: Vec::new(),
            body: None,
            subject: Subject::Any,
            must_be_in_time: false,
            id: rand::random(),
        }
    }

    pub fn get(path: impl Into<String>) -> Self {
        Call::new(Method::GET, path)
    }

    pub fn header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.push((name, value));
        self
    }

    /// Sets the body, of a media type.
    pub fn body(mut self, media_type: &'static str, body: impl Into<Bytes>) -> Self {
        self.body = Some(body.into());
        self.header(header::CONTENT_TYPE, HeaderValue::from_static(media_type))
    }

    pub fn json(self, body: Vec<u8>) -> Self {
        self.body(headers::JSON, body)
    }

    /// Says that an answer that comes late does not count.
    pub fn in_time(mut self) -> Self {
        self.must_be_in_time = true;
        self
    }

    /// Says that the call is about a chunk, or about a file in it. `None`: every server is as good.
    pub fn about(mut self, chunk: Option<Hash>, skip: usize) -> Self {
        self.subject = chunk.map_or(Subject::Any, |hash| Subject::Chunk { hash, skip });
        self
    }
}
