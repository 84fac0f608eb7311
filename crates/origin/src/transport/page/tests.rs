use super::*;

fn s3(inner: &str) -> Option<Page> {
    parse(format!("<?xml version=\"1.0\"?>\n<ListBucketResult>{inner}</ListBucketResult>").as_bytes())
}

fn keys(page: &Page) -> Vec<&str> {
    page.objects.iter().map(|object| object.path.as_str()).collect()
}

#[test]
fn a_key_is_returned_as_it_is() {
    let contents = |key: &str| format!("<Contents><Key>{key}</Key><Size>1</Size></Contents>");
    for (written, key) in [
        ("train/", "train/"),
        ("/a", "/a"),
        ("a//b", "a//b"),
        ("./..", "./.."),
        (" a ", " a "),
        ("a&#10;b", "a\nb"),
        ("a&#x1;b", "a\u{1}b"),
        ("a&amp;&lt;&quot;", "a&<\""),
        ("<![CDATA[a&b<c]]>", "a&b<c"),
        ("a\nb", "a\nb"),
        ("%41+", "%41+"),
    ] {
        assert_eq!(keys(&s3(&contents(written)).expect(written)), [key], "{written}");
    }
    let encoded = format!("{}<EncodingType>url</EncodingType>", contents("a%2Fb+c%0A%2B"));
    assert_eq!(keys(&s3(&encoded).expect("encoded")), ["a/b c\n+"]);
}

#[test]
fn only_a_key_and_its_size_are_needed() {
    let page =
        s3("<Contents><Size> 7 </Size><ETag/><LastModified>soon</LastModified><Key>k</Key></Contents>")
            .expect("a page");
    let object = ObjectMeta { path: "k".to_owned(), size: 7, mtime_ns: None, etag: None };
    assert_eq!(page.objects, [object]);
    for wrong in [
        "<Contents><Key>k</Key></Contents>",
        "<Contents><Size>1</Size></Contents>",
        "<Contents><Key>k</Key><Size>-1</Size></Contents>",
        "<Contents><Key>k</Key><Size>1</Size>",
        "<Contents><Key>&secret;</Key><Size>1</Size></Contents>",
    ] {
        assert_eq!(s3(wrong), None, "{wrong}");
    }
    for wrong in ["", "<html></html>", "<ListBucketResult>", "<!DOCTYPE a><ListBucketResult/>", "{}"] {
        assert_eq!(parse(wrong.as_bytes()), None, "{wrong}");
    }
    assert_eq!(parse(b"\xef\xbb\xbf<ListBucketResult/>"), Some(Page::default()));
}

#[test]
fn a_page_says_whether_more_follows() {
    let page = s3("<IsTruncated> true </IsTruncated><NextContinuationToken>t</NextContinuationToken>");
    let page = page.expect("a page");
    assert_eq!((page.is_truncated, page.token.as_deref()), (Some(true), Some("t")));
    let page = s3("<IsTruncated>false</IsTruncated><NextContinuationToken/>").expect("a page");
    assert_eq!((page.is_truncated, page.token), (Some(false), None));
    let page = s3("<NextContinuationToken></NextContinuationToken><NextMarker>m</NextMarker>");
    let page = page.expect("a page");
    assert_eq!((page.is_truncated, page.token, page.next_marker.as_deref()), (None, None, Some("m")));
}

#[test]
fn namespaces_indentation_and_unknown_elements_do_not_matter() {
    let text = "<?xml version='1.0' encoding='UTF-8'?>\n<s3:ListBucketResult xmlns:s3='urn:x' a='b'>\n  \
        <s3:Name>bucket</s3:Name>\n  <s3:Contents>\n    <s3:Owner><s3:ID>Key</s3:ID><s3:Key>no</s3:Key>\
        </s3:Owner>\n    <s3:Key>a</s3:Key>\n    <s3:LastModified>2024-11-05T10:00:00.000Z</s3:LastModified>\
        \n    <s3:ETag>&quot;e&quot;</s3:ETag>\n    <s3:Size>1</s3:Size>\n  </s3:Contents>\n  \
        <s3:CommonPrefixes><s3:Prefix>p/</s3:Prefix></s3:CommonPrefixes>\n</s3:ListBucketResult>\n";
    let page = parse(text.as_bytes()).expect("a page");
    let object = ObjectMeta {
        path: "a".to_owned(),
        size: 1,
        mtime_ns: Some(1_730_800_800_000_000_000),
        etag: Some("\"e\"".to_owned()),
    };
    assert_eq!(page.objects, [object]);
}

#[test]
fn azure_has_names_in_blobs_and_directories_of_its_own() {
    let text = "<?xml version=\"1.0\"?><EnumerationResults ContainerName=\"c\"><Blobs>\
        <Blob><Name>a</Name><Properties><Last-Modified>Tue, 05 Nov 2024 10:00:00 GMT</Last-Modified>\
        <Etag>0x8D</Etag><Content-Length>3</Content-Length></Properties>\
        <Metadata><Name>no</Name></Metadata></Blob>\
        <Blob><Name Encoded=\"true\">b%0Ac</Name><Properties><Content-Length>1</Content-Length></Properties>\
        </Blob><Blob><Name>dir</Name><Properties><ResourceType>directory</ResourceType></Properties></Blob>\
        <BlobPrefix><Name>p/</Name></BlobPrefix></Blobs><NextMarker>n</NextMarker></EnumerationResults>";
    let page = parse(text.as_bytes()).expect("a page");
    assert_eq!(keys(&page), ["a", "b\nc", "dir/"]);
    assert_eq!(page.objects[0].etag.as_deref(), Some("0x8D"));
    assert_eq!(page.objects[0].mtime_ns, Some(1_730_800_800_000_000_000));
    assert_eq!((page.token.as_deref(), page.is_truncated), (Some("n"), None));
    let last = text.replace("<NextMarker>n</NextMarker>", "<NextMarker />");
    assert_eq!(parse(last.as_bytes()).expect("the last page").token, None);
}

#[test]
fn common_prefixes_are_returned_as_they_are() {
    let page = s3("<Prefix>a/</Prefix><Contents><Key>a/k</Key><Size>1</Size></Contents><CommonPrefixes>\
         <Prefix>a/b%2Fc+/</Prefix></CommonPrefixes><EncodingType>url</EncodingType>")
    .expect("a page");
    assert_eq!(keys(&page), ["a/k"]);
    assert_eq!(page.prefixes, ["a/b/c /"]);
    let azure = "<EnumerationResults><Prefix>a/</Prefix><Blobs>\
         <BlobPrefix><Name>a/x/</Name></BlobPrefix>\
         <BlobPrefix><Name Encoded=\"true\">a/%0A/</Name></BlobPrefix>\
         <Blob><Name>a/k</Name><Properties><Content-Length>1</Content-Length></Properties></Blob>\
         </Blobs></EnumerationResults>";
    let page = parse(azure.as_bytes()).expect("a page");
    assert_eq!(keys(&page), ["a/k"]);
    assert_eq!(page.prefixes, ["a/x/", "a/\n/"]);
}
