use super::*;

#[test]
fn numbers_are_texts_and_zeros_are_absent() {
    let text = r#"{"header":{"cluster_id":"3249","revision":"7"},"succeeded":true,"responses":[
        {"response_range":{"header":{"revision":"7"},"kvs":[
            {"key":"L2YvcmluZw==","create_revision":"2","mod_revision":"5","version":"1","value":"eA=="}],
            "count":"1"}},
        {"response_range":{"header":{"revision":"7"}}},
        {"response_put":{"header":{"revision":"7"}}}]}"#;
    let txn: Txn = serde_json::from_str(text).expect("an answer");
    assert_eq!((txn.header.revision, txn.succeeded, txn.responses.len()), (7, true, 3));
    let range = txn.responses[0].response_range.as_ref().expect("a range");
    let kv = &range.kvs[0];
    assert_eq!((&*kv.key, &*kv.value, kv.mod_revision), (&b"/f/ring"[..], &b"x"[..], 5));
    assert!(txn.responses[1].response_range.as_ref().expect("a range").kvs.is_empty());
    let failed: Txn = serde_json::from_str(r#"{"header":{"revision":2}}"#).expect("an answer");
    assert_eq!((failed.header.revision, failed.succeeded), (2, false));
    let kept: KeptAlive = serde_json::from_str(r#"{"result":{"ID":"77","TTL":"5"}}"#).expect("an answer");
    assert_eq!(kept.result.ttl, 5);
    let ended: KeptAlive = serde_json::from_str(r#"{"result":{"ID":"78"}}"#).expect("an answer");
    assert_eq!(ended.result.ttl, 0);
    let error = r#"{"error":"etcdserver: x","message":"etcdserver: x","code":16}"#;
    let error: GrpcError = serde_json::from_str(error).expect("an error");
    assert_eq!((error.code, &*error.message), (16, "etcdserver: x"));
}

#[test]
fn a_prefix_ends_before_the_next_one() {
    assert_eq!(range_end("/fletch/a/members/"), base64("/fletch/a/members0"));
}
