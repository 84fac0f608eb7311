//! Serves the counters of a process of mounts over HTTP, to Prometheus and to nobody's browser.
//!
//! The page needs no token. Whoever reaches its port must not stop the mount, which needs descriptors and
//! memory to read data. So at most [`CONNECTIONS_MAX`] connections are open, each for at most
//! [`CONNECTION_TIME_MAX`]; further ones wait for their turn in the queue of the kernel.

use super::Snapshot;
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::{Router, response::IntoResponse, routing::get, serve::Listener};
use fletch_api::hosts::AllowedHosts;
use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Sleep, sleep},
};
use tokio_util::sync::CancellationToken;

/// The most connections at once.
const CONNECTIONS_MAX: usize = 16;
/// How long a connection lives, whatever it does.
const CONNECTION_TIME_MAX: Duration = Duration::from_secs(5);
/// The pause between two attempts to listen.
const BIND_RETRY_PAUSE: Duration = Duration::from_millis(500);
/// The pause after a failed accept, for example when the process has no descriptors left.
const ACCEPT_RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Checks that a request names this machine as its host.
///
/// The page needs no token, and a browser on this machine can reach it. A web page whose own name leads to a
/// loopback address (DNS rebinding) names that host.
fn check_host(uri: &Uri, headers: &HeaderMap) -> Result<(), String> {
    let line = uri.authority().map(|a| Some(a.as_str()));
    let named = line.into_iter().chain(headers.get_all(header::HOST).iter().map(|v| v.to_str().ok()));
    let hosts: Vec<Option<&str>> = named.collect();
    let loopback = AllowedHosts::default();
    let foreign = |host: &&Option<&str>| !host.is_some_and(|h| loopback.allows(h, "http"));
    match hosts.iter().find(foreign) {
        None if !hosts.is_empty() => Ok(()),
        None => Err("the request names no host; use 127.0.0.1 or localhost\n".to_owned()),
        Some(host) => {
            let host = host.unwrap_or("");
            Err(format!("the request names the host {host:?}; use 127.0.0.1 or localhost\n"))
        }
    }
}

/// Where the page is served.
#[derive(Debug)]
pub enum PageAddress {
    /// Here.
    Listening(TcpListener),
    /// Here, as soon as an earlier process lets go of it.
    Later(SocketAddr),
}

/// Listens at an address. `can_wait`: an earlier process of the same mounts may still have it, and must not
/// keep this one from serving them.
///
/// # Errors
/// The error of the system.
pub async fn listen(addr: SocketAddr, can_wait: bool) -> io::Result<PageAddress> {
    match TcpListener::bind(addr).await {
        Err(error) if can_wait => {
            tracing::warn!(%addr, %error, "metrics are served later");
            Ok(PageAddress::Later(addr))
        }
        bound => bound.map(PageAddress::Listening),
    }
}

/// Serves `GET /metrics` until `stop`. At a loopback address it answers only requests that name a loopback
/// address or `localhost` as their host. At another address every host that reaches it may read the page.
///
/// # Errors
/// The listener failed.
pub async fn serve(
    address: PageAddress,
    snapshot: Arc<dyn Fn() -> Snapshot + Send + Sync>,
    stop: CancellationToken,
) -> io::Result<()> {
    let listener = match address {
        PageAddress::Listening(listener) => listener,
        PageAddress::Later(addr) => loop {
            sleep(BIND_RETRY_PAUSE).await;
            if let Ok(listener) = TcpListener::bind(addr).await {
                break listener;
            }
        },
    };
    let is_loopback = listener.local_addr()?.ip().is_loopback();
    let page = move |uri: Uri, headers: HeaderMap| {
        let allowed = if is_loopback { check_host(&uri, &headers) } else { Ok(()) };
        let answer = allowed.map(|()| snapshot().prometheus());
        async move {
            match answer {
                Ok(Ok(text)) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
                Ok(Err(e)) => (StatusCode::INTERNAL_SERVER_ERROR, e.to_string()).into_response(),
                Err(refusal) => (StatusCode::MISDIRECTED_REQUEST, refusal).into_response(),
            }
        }
    };
    let app = Router::new().route("/metrics", get(page));
    let listener = PageListener { listener, connections: Arc::new(Semaphore::new(CONNECTIONS_MAX)) };
    axum::serve(listener, app).with_graceful_shutdown(async move { stop.cancelled().await }).await
}

struct PageListener {
    listener: TcpListener,
    connections: Arc<Semaphore>,
}

impl Listener for PageListener {
    type Io = PageConnection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (PageConnection, SocketAddr) {
        loop {
            // The semaphore is never closed.
            let Ok(permit) = Arc::clone(&self.connections).acquire_owned().await else { continue };
            match TcpListener::accept(&self.listener).await {
                Ok((stream, peer)) => {
                    let until = Box::pin(sleep(CONNECTION_TIME_MAX));
                    return (PageConnection { stream, until, _permit: permit }, peer);
                }
                Err(error) => {
                    tracing::debug!(%error, "cannot accept a connection to the metrics page");
                    sleep(ACCEPT_RETRY_PAUSE).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection with its permit and its end.
struct PageConnection {
    stream: TcpStream,
    until: Pin<Box<Sleep>>,
    _permit: OwnedSemaphorePermit,
}

impl PageConnection {
    fn check_time(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        match self.until.as_mut().poll(cx) {
            Poll::Ready(()) => Err(io::ErrorKind::TimedOut.into()),
            Poll::Pending => Ok(()),
        }
    }
}

impl AsyncRead for PageConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check_time(cx)?;
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for PageConnection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.check_time(cx)?;
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    #[test]
    fn only_requests_that_name_this_machine_are_answered() {
        let ask = |uri: &str, hosts: &[&str]| {
            let mut headers = HeaderMap::new();
            for host in hosts {
                headers.append(header::HOST, host.parse().expect("a value"));
            }
            check_host(&uri.parse().expect("a URI"), &headers)
        };
        for host in ["127.0.0.1:9", "localhost:9", "[::1]:9", "LOCALHOST"] {
            assert_eq!(ask("/metrics", &[host]), Ok(()), "{host}");
        }
        for hosts in [&["evil.example:9"][..], &[], &["localhost", "evil.example"], &[""], &["10.0.0.7"]] {
            assert!(ask("/metrics", hosts).expect_err("foreign").contains("use 127.0.0.1"), "{hosts:?}");
        }
        assert!(ask("http://evil.example/metrics", &["localhost"]).is_err());
    }

    async fn ask(address: SocketAddr) -> String {
        let mut stream = TcpStream::connect(address).await.expect("connected");
        let head = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
        stream.write_all(head).await.expect("sent");
        let mut text = String::new();
        stream.read_to_string(&mut text).await.expect("an answer");
        text
    }

    /// Descriptors of this process that are sockets. Each test runs in a process of its own.
    fn sockets() -> usize {
        let all = std::fs::read_dir("/proc/self/fd").expect("descriptors");
        let links = all.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
        links.filter(|to| to.to_string_lossy().starts_with("socket:")).count()
    }

    #[tokio::test]
    async fn idle_connections_take_few_descriptors_and_the_page_comes_in_its_turn() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let stop = CancellationToken::new();
        let tasks = tokio_util::task::TaskTracker::new();
        let serving =
            tasks.spawn(serve(PageAddress::Listening(listener), Arc::new(Snapshot::default), stop.clone()));
        assert!(ask(address).await.contains("fletch_mount_read_bytes_total"));
        let before = sockets();
        let mut idle = Vec::new();
        for _ in 0..100 {
            idle.push(TcpStream::connect(address).await.expect("connected"));
        }
        let begun = std::time::Instant::now();
        let answer = tasks.spawn(ask(address));
        sleep(Duration::from_millis(500)).await;
        let mine = idle.len() + 1;
        assert!(sockets() <= before + mine + CONNECTIONS_MAX, "{} for {mine} clients", sockets() - before);
        drop(idle);
        assert!(answer.await.expect("task").starts_with("HTTP/1.1 200"));
        // Connections that stay open are closed, one that sends its head in pieces, too.
        let mut slow = TcpStream::connect(address).await.expect("connected");
        while begun.elapsed() < Duration::from_secs(60) {
            sleep(Duration::from_secs(1)).await;
            if slow.write_all(b"G").await.is_err() {
                break;
            }
        }
        assert!(begun.elapsed() < CONNECTION_TIME_MAX * 2, "{:?}", begun.elapsed());
        stop.cancel();
        serving.await.expect("task").expect("served");
    }
}
