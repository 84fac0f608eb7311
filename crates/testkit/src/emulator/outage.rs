//! What fails: answers with an error of the test's choice, and outages of the whole store.

use http::{HeaderName, HeaderValue};
use parking_lot::Mutex;

/// An error of the store: a status, the code in its body, and further headers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The HTTP status.
    pub status: u16,
    /// The code in the XML of the body, such as `ExpiredToken`.
    pub code: String,
    /// Further headers, such as `Location`.
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

impl Refusal {
    /// Returns an error without further headers.
    #[must_use]
    pub fn new(status: u16, code: &str) -> Self {
        Refusal { status, code: code.to_owned(), headers: Vec::new() }
    }

    /// Adds a header.
    ///
    /// # Panics
    /// If the name or the value is none of HTTP's.
    #[must_use]
    pub fn with(mut self, name: &str, value: &str) -> Self {
        let name = HeaderName::try_from(name).expect("a header's name");
        self.headers.push((name, HeaderValue::try_from(value).expect("a header's value")));
        self
    }
}

/// An outage of the whole store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outage {
    /// Every request gets this error.
    Refuse(Refusal),
    /// No request gets an answer.
    Hang,
    /// The port closes, and with it every connection.
    ClosePort,
}

/// The outage that begins after a number of requests.
#[derive(Default)]
pub(super) struct Planned(Mutex<Option<(u64, Outage)>>);

impl Planned {
    /// Plans an outage after `requests` more requests; `None` ends it.
    pub fn set(&self, planned: Option<(u64, Outage)>) {
        *self.0.lock() = planned;
    }

    /// Counts a request. Returns the outage that the request meets.
    pub fn meet(&self) -> Option<Outage> {
        let mut planned = self.0.lock();
        let (left, outage) = planned.as_mut()?;
        if *left == 0 {
            return Some(outage.clone());
        }
        *left -= 1;
        None
    }
}
