//! Owns every task of the server and states the order in which it stops.
//!
//! ```text
//! start:  bind TCP (for its port) → lock and read state → open the disk tier → bind the socket → phase Ready → accept
//! stop:   phase Draining (readyz says 503) → stop accepting, remove the socket file
//!         → ask connections to end after the answer under way, wait at most `grace`
//!         → drop the rest → close the disk tier (registrations are fsynced when answered) → exit
//! ```
//! A fetch under way is not waited for: it only fills a cache (I5). A stop takes at most
//! `grace` and 2 s, whatever origins, disks and clients do.

mod connection;
mod disk;
mod listen;

pub use crate::server::StartError;
use crate::{
    config::Config,
    http,
    server::{Phase, Server},
};
use axum::Router;
use fletch_store::maintenance::{self, close};
use listen::Socket;
use std::{io, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};
use tokio::{
    net::{TcpListener, UnixListener},
    sync::Semaphore,
    task::JoinHandle,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// How often the tokens file is looked at.
const RELOAD_EVERY: Duration = Duration::from_secs(1);
/// How often idle jobs are looked for.
const EXPIRE_EVERY: Duration = Duration::from_secs(60);
/// How often leases are looked at whose time may be over.
const LEASES_EVERY: Duration = Duration::from_millis(250);
/// How long accepting rests when the system has no more descriptors.
const ACCEPT_REST: Duration = Duration::from_millis(100);
/// How long dropped connections get to go away.
const ABORT_WAIT: Duration = Duration::from_millis(500);

/// A server that answers requests.
pub struct Running {
    /// Where it listens for TCP.
    pub addr: SocketAddr,
    /// Where it listens for local processes.
    pub socket: Option<PathBuf>,
    /// Cancelling it begins the stop.
    pub stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Running {
    /// `http://host:port`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Stops it and waits until it has.
    pub async fn shutdown(self) {
        self.stop.cancel();
        self.stopped().await;
    }

    /// Waits until somebody stopped it.
    pub async fn stopped(self) {
        if let Err(e) = self.task.await {
            tracing::error!(error = %e, "the server's main task was lost");
        }
    }
}

/// What the tasks share.
struct App {
    server: Arc<Server>,
    router: Router,
    /// One for each connection.
    connection_permits: Arc<Semaphore>,
    connections: TaskTracker,
    /// Connections end after the answer under way.
    drain: CancellationToken,
    /// Connections end now.
    abort: CancellationToken,
}

/// Starts a server. When this returns it answers requests.
///
/// # Errors
/// [`StartError`], each with its fix.
pub async fn start(config: Config) -> Result<Running, StartError> {
    let tasks = TaskTracker::new();
    let io = |what: String, hint| move |error| StartError::Io { what, error, hint };
    let listener = std::net::TcpListener::bind(config.listen).map_err(io(
        format!("listen on {}", config.listen),
        "stop what listens there, or give another address with --listen (port 0 takes a free one)",
    ))?;
    let addr = listener.local_addr().map_err(io("local address".to_owned(), "see the system's log"))?;
    let server = Server::open(&config, addr, tasks.clone())?;
    disk::open_first(&server).await.map_err(StartError::Disk)?;
    // After the state: its lock keeps a second server from coming this far.
    let socket = config.socket.clone().map(Socket::bind).transpose()?;
    let tcp = listener
        .set_nonblocking(true)
        .and_then(|()| TcpListener::from_std(listener))
        .map_err(io(format!("listen on {addr}"), "see the system's log"))?;
    let app = Arc::new(App {
        router: http::router(Arc::clone(&server)),
        connection_permits: Arc::new(Semaphore::new(server.limits.connections)),
        connections: TaskTracker::new(),
        drain: CancellationToken::new(),
        abort: CancellationToken::new(),
        server,
    });
    let stop = CancellationToken::new();
    let path = socket.as_ref().map(|s| s.path().to_owned());
    app.server.enter(Phase::Ready);
    let task = tasks.spawn(run(app, tcp, socket, stop.clone()));
    Ok(Running { addr, socket: path, stop, task })
}

async fn run(app: Arc<App>, tcp: TcpListener, socket: Option<Socket>, stop: CancellationToken) {
    let accepting = TaskTracker::new();
    accepting.spawn(Arc::clone(&app).accept_tcp(tcp));
    if let Some(unix) = socket.as_ref().and_then(Socket::listener) {
        accepting.spawn(Arc::clone(&app).accept_unix(unix));
    }
    let (stop_maintenance, maintenance_tasks) = (CancellationToken::new(), TaskTracker::new());
    let disk = app.server.store.disk().map(Arc::clone);
    if let Some(disk) = disk.clone() {
        let server = Arc::clone(&app.server);
        maintenance_tasks.spawn(maintenance::run(server, disk, stop_maintenance.clone()));
    }
    let mut expire = tokio::time::interval(EXPIRE_EVERY);
    let mut reload = tokio::time::interval(RELOAD_EVERY);
    let mut leases = tokio::time::interval(LEASES_EVERY);
    leases.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            _ = expire.tick() => app.server.expire_jobs(),
            _ = leases.tick() => app.server.registry.tick(app.server.now_ns()),
            _ = reload.tick() => {
                let server = Arc::clone(&app.server);
                // Not waited for: the file may lie on a disk that does not answer.
                accepting.spawn_blocking(move || server.reload_tokens());
            }
        }
    }
    tracing::info!("stopping: no new connections, answers under way are finished");
    app.server.enter(Phase::Draining);
    app.server.warmups.stop();
    app.drain.cancel();
    accepting.close();
    accepting.wait().await;
    drop(socket);
    app.connections.close();
    if tokio::time::timeout(app.server.limits.grace, app.connections.wait()).await.is_err() {
        tracing::warn!(
            connections = app.connections.len(),
            "answers still under way after the grace are cut"
        );
        app.abort.cancel();
        if tokio::time::timeout(ABORT_WAIT, app.connections.wait()).await.is_err() {
            tracing::warn!("some connections did not end");
        }
    }
    let server = Arc::clone(&app.server);
    let traces = tokio::task::spawn_blocking(move || server.registry.end_traces());
    if tokio::time::timeout(ABORT_WAIT, traces).await.is_err() {
        tracing::warn!("the ends of some traces were not written");
    }
    stop_maintenance.cancel();
    maintenance_tasks.close();
    maintenance_tasks.wait().await;
    if let Some(disk) = disk {
        close(disk).await;
    }
    tracing::info!("stopped");
}

impl App {
    async fn accept_tcp(self: Arc<Self>, listener: TcpListener) {
        self.accept(|| async {
            let (stream, _) = listener.accept().await?;
            stream.set_nodelay(true)?;
            Ok(stream)
        })
        .await;
    }

    async fn accept_unix(self: Arc<Self>, listener: UnixListener) {
        self.accept(|| async { Ok(listener.accept().await?.0) }).await;
    }

    /// Takes a place before it takes a connection: more wait in the kernel's queue.
    async fn accept<S, F>(self: &Arc<Self>, next: impl Fn() -> F)
    where
        S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
        F: Future<Output = io::Result<S>>,
    {
        loop {
            let accepted = tokio::select! {
                () = self.drain.cancelled() => return,
                accepted = async {
                    let permit = Arc::clone(&self.connection_permits).acquire_owned().await;
                    (permit, next().await)
                } => accepted,
            };
            match accepted {
                (Ok(permit), Ok(stream)) => {
                    let app = Arc::clone(self);
                    self.connections.spawn(async move { app.serve(stream, permit).await });
                }
                (Err(_), _) => return,
                (_, Err(e)) => {
                    tracing::warn!(error = %e, "accepting a connection failed");
                    tokio::time::sleep(ACCEPT_REST).await;
                }
            }
        }
    }
}
