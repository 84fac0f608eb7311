use super::*;

fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
    let line = |(name, value): &(&'static str, &str)| {
        (http::HeaderName::from_static(name), HeaderValue::try_from(*value).expect("a value"))
    };
    lines.iter().map(line).collect()
}

fn ranged(first: u64, last: u64, is_plain: bool) -> Asked {
    Asked::of(&Method::GET, None, &headers(&[("range", &format!("bytes={first}-{last}"))]), is_plain)
}

fn whole(is_plain: bool) -> Asked {
    Asked::of(&Method::GET, None, &HeaderMap::new(), is_plain)
}

fn check(
    asked: &Asked,
    status: u16,
    lines: &[(&'static str, &str)],
) -> Result<(Answered, HeaderMap), String> {
    let mut headers = headers(lines);
    let status = StatusCode::from_u16(status).expect("a status");
    asked.check(status, &mut headers).map(|answered| (answered, headers)).map_err(|e| e.to_string())
}

/// A request, the status and the headers of its answer, and words of the error.
type Case<'a> = (&'a Asked, u16, &'a [(&'static str, &'a str)], &'a str);

#[test]
fn answers_that_do_not_fit_say_what_came_and_what_was_expected() {
    let range = ranged(10, 19, false);
    let cases: [Case<'_>; 13] = [
        (&whole(false), 204, &[], "status 204, no Content-Length; expected status 200 with the whole object"),
        (&whole(false), 206, &[("content-length", "5")], "expected status 200 with the whole object"),
        (&whole(false), 304, &[], "status 304, no Content-Length; expected the object"),
        (&whole(false), 412, &[], "status 412"),
        (&whole(false), 200, &[], "status 200, no Content-Length; expected the length of the object"),
        (
            &whole(true),
            200,
            &[("content-encoding", "gzip"), ("content-length", "31")],
            "status 200, Content-Encoding gzip, Content-Length 31; expected the stored bytes",
        ),
        (&range, 204, &[], "status 204, no Content-Length; expected status 206"),
        (&range, 200, &[("content-length", "99")], "status 200, Content-Length 99; expected status 206"),
        (&range, 206, &[("content-length", "10")], "status 206, Content-Length 10; expected bytes 10-19"),
        (
            &range,
            206,
            &[("content-length", "10"), ("content-range", "bytes 11-20/100")],
            "status 206, Content-Range 11-20, Content-Length 10; expected bytes 10-19",
        ),
        (
            &range,
            206,
            &[("content-length", "9"), ("content-range", "bytes 10-18/100")],
            "expected bytes 10-19",
        ),
        (
            &range,
            206,
            &[("content-length", "30"), ("content-range", "bytes 10-19/100"), ("content-encoding", "gzip")],
            "status 206, Content-Encoding gzip, Content-Range 10-19, Content-Length 30; expected bytes \
             10-19 of the stored bytes",
        ),
        (&range, 206, &[("content-type", "multipart/byteranges")], "expected bytes 10-19"),
    ];
    for (asked, status, lines, text) in cases {
        let error = check(asked, status, lines).expect_err(text);
        assert!(error.contains(text), "{error:?} should contain {text:?}");
    }
}

#[test]
fn a_range_of_an_object_of_unknown_size_is_accepted() {
    let (answered, headers) =
        check(&ranged(10, 19, true), 206, &[("content-range", "bytes 10-19/*")]).expect("RFC 9110 allows it");
    assert!(answered.is_size_unknown);
    assert_eq!(
        (&headers[CONTENT_RANGE], &headers[CONTENT_LENGTH]),
        (&HeaderValue::from_static("bytes 10-19/20"), &HeaderValue::from_static("10"))
    );
    // A size of `*` does not explain a short range.
    check(&ranged(10, 19, true), 206, &[("content-range", "bytes 10-15/*")]).expect_err("short");
    // A range that ends after the object is cut at its end.
    let cut = [("content-range", "bytes 10-15/16"), ("content-length", "6")];
    assert!(!check(&ranged(10, 19, true), 206, &cut).expect("cut").0.is_size_unknown);
}

#[test]
fn malformed_ranges_are_no_ranges() {
    for value in [
        "bytes 10-19",
        "bytes */*",
        "bytes 19-10/100",
        "bytes 10-19/15",
        "bytes +10-19/100",
        "bytes 10-18446744073709551615/*",
        "items 10-19/100",
        "bytes=10-19/100",
        "bytes 10-19/1e3",
        "",
    ] {
        check(&ranged(10, 19, false), 206, &[("content-range", value)]).expect_err(value);
    }
    check(&ranged(10, 19, false), 206, &[("content-range", "Bytes 10-19/100")]).expect("any case");
}

#[test]
fn a_stored_coding_of_a_blob_store_is_no_fault_and_foreign_words_are_not_shown() {
    // At S3, Azure and GCS the coding is a property that the writer of the object gave it.
    let stored = [("content-encoding", "gzip"), ("content-length", "31")];
    assert_eq!(check(&whole(false), 200, &stored).expect("stored").0.coding, Some("gzip"));
    let plain = [("content-encoding", "identity"), ("content-length", "31")];
    assert_eq!(check(&whole(true), 200, &plain).expect("no coding").0.coding, None);
    let foreign = [("content-encoding", "hunter2"), ("content-length", "31")];
    let error = check(&whole(true), 200, &foreign).expect_err("a coding");
    assert!(error.contains("an unknown coding") && !error.contains("hunter2"), "{error}");
    let code = |body: &str| ErrorCode::in_document(body.as_bytes()).to_string();
    let denied = code("<Error><Code>AccessDenied</Code><Message>hunter2</Message>");
    assert!(denied.starts_with(" AccessDenied (the credentials") && !denied.contains("hunter2"), "{denied}");
    assert_eq!(code("<Error><Code>NoSuchKey</Code>"), " NoSuchKey");
    assert_eq!(code("<Error><Code>hunter2</Code>"), "");
}

#[test]
fn only_words_of_the_form_of_a_region_are_shown() {
    let region = |text| Region::of(&headers(&[("x-amz-bucket-region", text)])).map(|r| r.to_string());
    for real in ["eu-west-1", "us-gov-west-1", "ap-southeast-2", "us-iso-east-1"] {
        assert_eq!(region(real).as_deref(), Some(real));
    }
    for foreign in ["", "hunter2", "EU", "eu-west-one", "eu-west-100", "eu west-1", "eu-west-1-x", "-west-1"]
    {
        assert_eq!(region(foreign), None, "{foreign}");
    }
}

#[test]
fn answers_to_writes_are_left_to_the_store() {
    let put = Asked::of(&Method::PUT, None, &HeaderMap::new(), false);
    for status in [200, 201, 204, 304, 409, 412] {
        check(&put, status, &[]).expect("not a read");
    }
}
