//! Changes requests that `object_store` cannot express, and signs them again.
//!
//! `object_store` sends neither the `marker` of the first version of S3's listing, nor a key with a control
//! character. A caller puts a [`Rewrite`] into the extensions of such a request.

use http::header::AUTHORIZATION;
use object_store::CredentialProvider;
use object_store::aws::{AwsAuthorizer, AwsCredential};
use object_store::azure::{AzureAuthorizer, AzureCredential};
use object_store::client::HttpRequest;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use std::sync::Arc;

/// The key of a request whose [`Rewrite`] has the real one. Its bytes stand in a URL as they are: the client
/// of GCS encodes every byte that is no letter and no digit.
pub(crate) const PLACEHOLDER: &str = "fletchrewrittenkey";

/// All bytes but the unreserved ones of RFC 3986, as signatures of S3 require.
const RESERVED: AsciiSet = NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// How a request differs from the one that `object_store` makes. Travels in the request's extensions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Rewrite {
    /// The key in place of [`PLACEHOLDER`].
    Key(String),
    /// The key after which a page of a listing begins, for stores without continuation tokens.
    Marker(String),
}

/// The credentials by which a rewritten request is signed again. Bearer tokens need no signature.
#[derive(Debug, Clone)]
pub(crate) enum Signer {
    Aws(Arc<dyn CredentialProvider<Credential = AwsCredential>>),
    Azure(Arc<dyn CredentialProvider<Credential = AzureCredential>>),
}

/// Why a request could not be rewritten. Has no text of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the request for an unusual key or page could not be signed")]
pub(crate) struct NotRewritten;

/// Returns the request with the changes of `rewrite`, signed if it was signed before.
///
/// # Errors
/// [`NotRewritten`], or the error of the credentials.
pub(crate) async fn rewrite(
    mut request: HttpRequest,
    rewrite: &Rewrite,
    signer: Option<&Signer>,
) -> Result<HttpRequest, Box<dyn std::error::Error + Send + Sync>> {
    let before = request.uri().to_string();
    let (path, query) = match before.split_once('?') {
        Some((path, query)) => (path, Some(query)),
        None => (before.as_str(), None),
    };
    let after = match rewrite {
        Rewrite::Key(key) => {
            let parent = path.strip_suffix(PLACEHOLDER).ok_or(NotRewritten)?;
            let parts: Vec<String> =
                key.split('/').map(|part| utf8_percent_encode(part, &RESERVED).to_string()).collect();
            let query = query.map(|query| format!("?{query}")).unwrap_or_default();
            format!("{parent}{}{query}", parts.join("/"))
        }
        Rewrite::Marker(key) => {
            let query = query.map(|query| format!("{query}&")).unwrap_or_default();
            format!("{path}?{query}marker={}", utf8_percent_encode(key, &RESERVED))
        }
    };
    *request.uri_mut() = after.parse().map_err(|_| NotRewritten)?;
    let signature = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let Some(signature) = signature.map(str::to_owned) else { return Ok(request) };
    if let Some(scope) = signature.strip_prefix("AWS4-HMAC-SHA256 Credential=") {
        // KEY/DATE/REGION/SERVICE/aws4_request; a key may have a slash.
        let scope = scope.split([',', ' ']).next().unwrap_or_default();
        let mut parts = scope.rsplit('/').skip(1);
        let (Some(service), Some(region)) = (parts.next(), parts.next()) else {
            return Err(NotRewritten.into());
        };
        let Some(Signer::Aws(provider)) = signer else { return Err(NotRewritten.into()) };
        let credential = provider.get_credential().await?;
        request.headers_mut().remove(AUTHORIZATION);
        AwsAuthorizer::new(&credential, service, region).try_authorize(&mut request, None)?;
    } else if let Some(rest) = signature.strip_prefix("SharedKey ") {
        let account = rest.split(':').next().unwrap_or_default();
        let Some(Signer::Azure(provider)) = signer else { return Err(NotRewritten.into()) };
        let credential = provider.get_credential().await?;
        request.headers_mut().remove(AUTHORIZATION);
        AzureAuthorizer::new(&credential, account).try_authorize(&mut request)?;
    }
    Ok(request)
}

#[cfg(test)]
mod tests {
    use super::*;
    use object_store::StaticCredentialProvider;

    fn request(uri: &str, authorization: Option<&str>) -> HttpRequest {
        let mut builder = http::Request::builder().uri(uri);
        if let Some(value) = authorization {
            builder = builder.header(AUTHORIZATION, value);
        }
        builder.body(Vec::new().into()).expect("a request")
    }

    #[tokio::test]
    async fn keys_and_markers_are_encoded_once() {
        assert!(PLACEHOLDER.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{PLACEHOLDER}");
        let key = Rewrite::Key("a b/new\nline+%".to_owned());
        let at = format!("http://h/bucket/{PLACEHOLDER}?x=1");
        let done = rewrite(request(&at, None), &key, None).await.expect("rewritten");
        assert_eq!(done.uri().to_string(), "http://h/bucket/a%20b/new%0Aline%2B%25?x=1");
        assert!(rewrite(request("http://h/bucket/other", None), &key, None).await.is_err());
        let marker = Rewrite::Marker("a&b".to_owned());
        let done = rewrite(request("http://h/b?list-type=2", None), &marker, None).await.expect("rewritten");
        assert_eq!(done.uri().to_string(), "http://h/b?list-type=2&marker=a%26b");
        let done = rewrite(request("http://h/b", Some("Bearer t")), &marker, None).await.expect("rewritten");
        assert_eq!(done.headers()[AUTHORIZATION], "Bearer t");
    }

    #[tokio::test]
    async fn a_signed_request_is_signed_again_in_its_scope() {
        let marker = Rewrite::Marker("k".to_owned());
        let old = "AWS4-HMAC-SHA256 Credential=AKID/20240101/eu-west-1/s3/aws4_request, SignedHeaders=host, \
                   Signature=00";
        let aws = AwsCredential { key_id: "AKID".into(), secret_key: "hunter2".into(), token: None };
        let signer = Signer::Aws(Arc::new(StaticCredentialProvider::new(aws)));
        let done = rewrite(request("http://h/b?list-type=2", Some(old)), &marker, Some(&signer)).await;
        let done = done.expect("rewritten");
        let text = done.headers()[AUTHORIZATION].to_str().expect("text");
        assert!(text.contains("/eu-west-1/s3/aws4_request") && !text.contains("Signature=00"), "{text}");
        assert!(rewrite(request("http://h/b", Some(old)), &marker, None).await.is_err(), "no credentials");
    }
}
