//! Translates the errors of `object_store` into [`OriginError`].
//!
//! Leaves out the texts of `object_store`: they may repeat a signed request, a body or a header.

use crate::OriginError;
use crate::address::RefusedAddress;
use crate::transport::BadAnswer;
use crate::transport::credentials_client::NoCredentials;
use object_store::Error;
use object_store::client::{HttpError, HttpErrorKind};

pub(super) fn changed(what: &str, why: &str) -> OriginError {
    OriginError::Changed { what: what.to_owned(), why: why.to_owned() }
}

pub(super) fn wrong_answer(what: &str, why: impl ToString) -> OriginError {
    OriginError::WrongAnswer { what: what.to_owned(), why: why.to_string(), is_of_origin: false }
}

pub(super) fn unavailable(what: &str, why: &str) -> OriginError {
    OriginError::Unavailable { what: what.to_owned(), why: why.to_owned() }
}

pub(super) fn translate(what: &str, error: &Error) -> OriginError {
    let owned = what.to_owned();
    match error {
        Error::NotFound { .. } => return OriginError::NotFound { what: owned },
        Error::AlreadyExists { .. } => return OriginError::AlreadyExists { what: owned },
        Error::Precondition { .. } | Error::NotModified { .. } => {
            return changed(what, "its etag differs");
        }
        Error::InvalidPath { source } => return OriginError::invalid(what, source),
        Error::NotSupported { .. } | Error::NotImplemented { .. } | Error::UnknownConfigurationKey { .. } => {
            return OriginError::invalid(what, "the store does not support this operation");
        }
        _ => {}
    }
    if let Some(answer) = cause::<BadAnswer>(error) {
        let why = answer.to_string();
        return match answer {
            BadAnswer::SlowDown { retry_after } => {
                OriginError::Throttled { what: owned, retry_after: *retry_after }
            }
            BadAnswer::Failed { .. } => OriginError::Unavailable { what: owned, why },
            BadAnswer::Denied { status, code } => {
                // 407 is a proxy's answer, and 401 is about credentials, whatever is asked with them.
                let is_of_origin = matches!(status, 401 | 407) || code.is_of_credentials();
                OriginError::Denied { what: owned, why, is_of_origin }
            }
            BadAnswer::Expired { .. } => OriginError::Expired { what: owned, why, is_given: false },
            BadAnswer::OtherRegion { .. } => OriginError::OtherRegion { what: owned, why },
            BadAnswer::NoBucket { .. } => OriginError::NoBucket { what: owned, why },
            BadAnswer::Refused { .. } | BadAnswer::PastEnd { .. } => {
                OriginError::Invalid { what: owned, why }
            }
            BadAnswer::Redirected { is_plain, .. } => {
                // A plain server may move one file.
                OriginError::WrongAnswer { what: owned, why, is_of_origin: !is_plain }
            }
            BadAnswer::RangeIgnored(_)
            | BadAnswer::Unexpected { .. }
            | BadAnswer::TooLong
            | BadAnswer::NoListing => wrong_answer(what, why),
        };
    }
    if let Some(refused) = cause::<RefusedAddress>(error) {
        return OriginError::invalid(what, refused);
    }
    if let Some(NoCredentials { why, transient }) = cause(error) {
        let why = why.clone();
        return match transient {
            true => OriginError::Unavailable { what: owned, why },
            false => OriginError::Denied { what: owned, why, is_of_origin: true },
        };
    }
    match (cause::<HttpError>(error), error) {
        (Some(http), _) if http.kind() != HttpErrorKind::Decode => unavailable(what, &deepest(http)),
        (None, Error::PermissionDenied { .. } | Error::Unauthenticated { .. }) => {
            let why = "the store rejected the credentials".to_owned();
            OriginError::Denied { what: owned, why, is_of_origin: false }
        }
        // The error of a parser quotes what it parsed.
        _ => wrong_answer(what, "its headers or its body have another form than this kind of store sends"),
    }
}

/// Returns the first cause that is a `T`.
pub(super) fn cause<T: std::error::Error + 'static>(error: &Error) -> Option<&T> {
    let mut source = std::error::Error::source(error);
    while let Some(next) = source {
        match next.downcast_ref() {
            Some(found) => return Some(found),
            None => source = next.source(),
        }
    }
    None
}

/// Returns the innermost cause of a failed transport, such as "connection refused".
fn deepest(error: &dyn std::error::Error) -> String {
    let mut last: &dyn std::error::Error = error;
    while let Some(next) = last.source() {
        last = next;
    }
    last.to_string()
}
