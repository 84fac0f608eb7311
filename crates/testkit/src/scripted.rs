//! A server on a loopback port that answers each request with the bytes that a test chooses.
//!
//! For answers that an HTTP library would not send: wrong lengths, odd statuses, foreign encodings. It closes
//! the connection after each answer.

use crate::serve::Server;
use crate::tls;
use parking_lot::Mutex;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// The longest head of a request, in bytes.
const HEAD_BYTES_MAX: usize = 64 << 10;

type Requests = Arc<Mutex<Vec<String>>>;

/// A running server. Dropping it closes the port.
pub struct ScriptedServer {
    server: Server,
    requests: Requests,
}

impl ScriptedServer {
    /// Starts a server that answers a request, given by its head, with whole bytes: a status line and so on.
    ///
    /// # Panics
    /// If it gets no port or no threads.
    #[must_use]
    pub fn start(answer: impl Fn(&str) -> Vec<u8> + Send + Sync + 'static) -> Self {
        let requests = Requests::default();
        let (answer, kept) = (Arc::new(answer), Arc::clone(&requests));
        let server = Server::start(move |stream| {
            let (answer, requests) = (Arc::clone(&answer), Arc::clone(&kept));
            async move {
                // The client sees a broken connection as an error, which is what some tests want.
                let _ = serve(stream, &*answer, &requests).await;
            }
        });
        ScriptedServer { server, requests }
    }

    /// Starts a server as [`ScriptedServer::start`] does, which speaks TLS with the certificate of [`tls`].
    ///
    /// # Panics
    /// If it gets no port or no threads.
    #[must_use]
    pub fn start_tls(answer: impl Fn(&str) -> Vec<u8> + Send + Sync + 'static) -> Self {
        let (requests, acceptor) = (Requests::default(), tls::acceptor());
        let (answer, kept) = (Arc::new(answer), Arc::clone(&requests));
        let server = Server::start(move |stream| {
            let (answer, requests, acceptor) = (Arc::clone(&answer), Arc::clone(&kept), acceptor.clone());
            async move {
                // A client that does not trust the certificate ends the handshake, which some tests want.
                if let Ok(stream) = acceptor.accept(stream).await {
                    let _ = serve(stream, &*answer, &requests).await;
                }
            }
        });
        ScriptedServer { server, requests }
    }

    /// Returns the address on which the server listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.server.address
    }

    /// Returns `http://127.0.0.1:PORT`.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.server.address)
    }

    /// Returns the heads of all requests so far.
    #[must_use]
    pub fn heads(&self) -> Vec<String> {
        let head = |request: &String| match request.find("\r\n\r\n") {
            Some(end) => request[..end + 4].to_owned(),
            None => request.clone(),
        };
        self.requests.lock().iter().map(head).collect()
    }

    /// Returns all requests so far, each a head and a body.
    #[must_use]
    pub fn requests(&self) -> Vec<String> {
        self.requests.lock().clone()
    }
}

async fn serve(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    answer: &(dyn Fn(&str) -> Vec<u8> + Send + Sync),
    requests: &Requests,
) -> std::io::Result<()> {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(at) = bytes.windows(4).position(|w| w == b"\r\n\r\n") {
            break at + 4;
        }
        if bytes.len() > HEAD_BYTES_MAX || stream.read_buf(&mut bytes).await? == 0 {
            return Ok(());
        }
    };
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let length = header(&head, "content-length").and_then(|v| v.parse().ok()).unwrap_or(0);
    while bytes.len() < end + length && stream.read_buf(&mut bytes).await? > 0 {}
    requests.lock().push(String::from_utf8_lossy(&bytes).into_owned());
    stream.write_all(&answer(&head)).await?;
    stream.shutdown().await
}

/// Returns the value of a header in the head of a request. `name` is in lower case.
#[must_use]
pub fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().skip(1).find_map(|line| {
        let (key, value) = line.split_once(':')?;
        key.eq_ignore_ascii_case(name).then(|| value.trim())
    })
}

/// Returns an answer: a status line such as `200 OK`, headers, and a body with its `Content-Length`.
#[must_use]
pub fn answer(status: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut text = format!("HTTP/1.1 {status}\r\nConnection: close\r\n");
    if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-length")) {
        text.push_str(&format!("Content-Length: {}\r\n", body.len()));
    }
    for (name, value) in headers.iter().filter(|(_, value)| !value.is_empty()) {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    text.push_str("\r\n");
    [text.as_bytes(), body].concat()
}
