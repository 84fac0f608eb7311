//! `fletch s3`: credentials and address of the server's S3 door.

use super::Context;
use crate::cli::S3Command;
use crate::failure::Failure;
use fletch_api::s3::S3Credentials;
use fletch_settings::Span;
use serde::Serialize;
use std::io::{self, Write};

/// What `fletch s3 credentials` prints.
#[derive(Serialize)]
struct Credentials<'a> {
    access_key_id: &'a str,
    secret_access_key: &'a str,
    expires_ns: Option<u64>,
    endpoint_url: &'a str,
    bucket: &'a str,
}

pub fn run(ctx: &Context, what: S3Command) -> Result<(), Failure> {
    let S3Command::Credentials { ttl } = what;
    let (client, server) = ctx.reached()?;
    let given = ctx.rt.block_on(client.at(&server).s3_credentials(ttl.map(|Span(ttl)| ttl)))?;
    let endpoint = given.door.url(host(&server));
    let shown = Credentials {
        access_key_id: &given.access_key_id,
        secret_access_key: &given.secret_access_key,
        expires_ns: given.expires_ns,
        endpoint_url: &endpoint,
        bucket: &given.door.bucket,
    };
    ctx.out.result(&shown, |w| write_variables(w, &given, &endpoint))
}

/// Returns the host of a server's URL; `None` for a unix socket.
fn host(url: &str) -> Option<&str> {
    let (_, rest) = url.split_once("://")?;
    let authority = rest.split('/').next()?;
    Some(match authority.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|digit| digit.is_ascii_digit()) => host,
        _ => authority,
    })
}

/// Writes the variables that the tools of AWS and most S3 clients read, for `eval` in a shell.
fn write_variables(w: &mut dyn Write, given: &S3Credentials, endpoint: &str) -> io::Result<()> {
    writeln!(w, "export AWS_ACCESS_KEY_ID={}", given.access_key_id)?;
    writeln!(w, "export AWS_SECRET_ACCESS_KEY={}", given.secret_access_key)?;
    writeln!(w, "export AWS_ENDPOINT_URL={endpoint}")?;
    writeln!(w, "export AWS_REGION=us-east-1")?;
    writeln!(w, "export AWS_DEFAULT_REGION=us-east-1")?;
    // One of an older login would be sent along, and the server takes none.
    writeln!(w, "unset AWS_SESSION_TOKEN")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_door_is_at_the_host_of_the_server() {
        assert_eq!(host("http://127.0.0.1:7380"), Some("127.0.0.1"));
        assert_eq!(host("https://cache.example"), Some("cache.example"));
        assert_eq!(host("https://[::1]:7380/"), Some("[::1]"));
        assert_eq!(host("unix:/run/fletch/server.sock"), None);
    }
}
