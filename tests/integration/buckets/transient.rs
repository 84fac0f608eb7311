//! Answers that every S3 client retries.

use crate::form::{Form, check};
use fletch_testkit::{Fault, Refusal};

#[test]
fn answers_that_every_client_retries() {
    let form = |name, status, code| {
        let refused = Fault::Refuse(Refusal::new(status, code));
        Form::entries(name, &["a", "b", "c"], &["a", "b", "c"]).failing("b", refused, 2)
    };
    let listing = |name, status, code| {
        let refused = Fault::Refuse(Refusal::new(status, code));
        Form::entries(name, &["a", "b"], &["a", "b"]).failing("", refused, 1)
    };
    check(&[
        form("400 RequestTimeout", 400, "RequestTimeout"),
        form("409 OperationAborted", 409, "OperationAborted"),
        form("499", 499, "ClientClosedRequest"),
        form("416 on a range that exists", 416, "InvalidRange"),
        form("400 SlowDown", 400, "SlowDown"),
        form("403 SlowDown", 403, "SlowDown"),
        form("429 SlowDown", 429, "SlowDown"),
        form("503 SlowDown", 503, "SlowDown"),
        form("500 InternalError", 500, "InternalError"),
        listing("a listing refused with 400 RequestTimeout", 400, "RequestTimeout"),
        listing("a listing refused with 400 SlowDown", 400, "SlowDown"),
    ]);
}
