//! The parts of a running server, which every request can use.

mod publish_place;
mod recover;
mod s3_door;
mod start_error;

pub use publish_place::{NoPlace, PublishPlace};
pub use recover::RecoverPlan;
pub use s3_door::S3Door;
pub use start_error::StartError;

use crate::{
    admin::dashboard::{DashboardState, Prometheus},
    app::{
        config::{CacheConfig, Config, LocalDir},
        idle::Activity,
        limits::{CACHE_MIN, Limits, PROBES_MAX, SLABS_MAX},
        request_metrics::RequestMetrics,
        telemetry::ReadWatch,
        tls::Tls,
    },
    cluster::ClusterState,
    cluster::{
        catalog::{Catalog, Effects},
        groups::Groups,
    },
    data::{
        chunk_reads::{ChunkReads, READ_ATTEMPTS},
        drafts::{Listings, SealContext, Seals},
        learned::LearnedNames,
        read_ahead::ReadAhead,
        reads::Reads,
        versions::{Allowlist, VersionLimits, Versions, dataset_bytes, local_tables},
        warmups::{WarmupContext, Warmups},
    },
    tenancy::{
        accounting::{Accounts, JobLimits, LABELS_MAX, LiveJob, LiveJobs, SavingsFile, TooManyJobs},
        auth::{AllowedHosts, Auth, Quota},
        connections::{Connections, RequestMemory, TableLimits},
        credentials::{HeldCredentials, is_personal},
        mounts::AnnouncedMounts,
        state::{Registrations, StateDir, StateError},
        tenants::{TenantLimit, Tenants},
    },
    training::{
        allocation::{Allocator, Limits as AllocationLimits, TenantShare},
        epochs::{JobContext, LeaseClock},
        jobs::{Reclaims, Registry},
        prefetch::{PrefetchContext, PrefetchPool},
        sweep::{Recorder, SweepContext},
    },
};
use fletch_api::DatasetUse;
use fletch_core::{DatasetName, Domain, JobName, Tenant, cluster::Weight};
use fletch_origin::{OriginLimits, Origins};
use fletch_settings::{Amount, ByteSize};
use fletch_store::{
    DatasetId, DiskTier, Part, QuotaUse, Shares, Store, StoreLimits, TenantQuota,
    disk::{DiskConfig, FsSpace, MountMemory, Policy},
};
use publish_place::TABLES_DIR;
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    net::SocketAddr,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::sync::watch;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// The directory of the state directory that remembers where cache directories lie.
const CACHE_RECORDS: &str = "caches";

/// The directory of the state directory for the journals and temporary tables of seals.
const SEALS_DIR: &str = "seals";
/// The most objects of one seal that are read at once: readers come first.
const SEAL_PARALLEL_MAX: usize = 8;

/// The most displaced jobs whose accounts wait to be folded.
const DISPLACED_MAX: usize = 256;

/// The domain and the name of a dataset.
pub type ShareName = (Domain, DatasetName);

/// The phases of a server's life, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// The server loads its state.
    Starting = 0,
    /// The server takes requests.
    Ready = 1,
    /// The server stops.
    Draining = 2,
}

/// The parts of a running server.
pub struct Server {
    pub limits: Limits,
    /// Authentication.
    pub auth: Auth,
    /// TLS of the TCP listener. `None`: plain HTTP.
    pub tls: Option<Tls>,
    /// The S3 door. `None`: it is off.
    pub s3: Option<S3Door>,
    /// The hosts by which a request may name a server without tokens.
    pub hosts: AllowedHosts,
    /// The settings of the disk tier.
    pub cache: CacheConfig,
    /// Notifies when access to a version may have ended, or the server stops.
    pub access_changes: watch::Sender<()>,
    /// The store of chunks, in memory and on disk.
    pub store: Arc<Store>,
    /// The datasets' shares of the disk.
    pub shares: Arc<Shares>,
    /// Decides about the shares that are divided by what they are worth to jobs.
    pub allocator: Allocator,
    /// The warm-ups.
    pub warmups: Arc<Warmups>,
    /// The listings of datasets that were registered by their URIs alone.
    pub listings: Arc<Listings>,
    /// The sealing of drafts.
    pub seals: Arc<Seals>,
    /// The mounts that read through this server.
    pub mounts: AnnouncedMounts,
    /// The place for version tables of clients that name none.
    pub publish: PublishPlace,
    /// The origins, which hold the secrets that a user handed over.
    pub origins: Origins,
    /// Whose credentials a user handed over.
    pub credentials: HeldCredentials,
    /// The open versions.
    pub versions: Arc<Versions>,
    /// The registered datasets.
    pub registrations: Arc<Registrations>,
    /// The declared jobs and their epochs.
    pub registry: Registry,
    /// What the ranks of jobs said whose ledgers are lost.
    pub reclaims: Reclaims,
    /// The live jobs, declared or not.
    pub live_jobs: LiveJobs,
    /// The accounts of delivered bytes.
    pub accounts: Arc<Accounts>,
    /// What the cache saved, across restarts.
    pub savings: SavingsFile,
    pub requests: Arc<RequestMetrics>,
    /// How long reads wait, and where.
    pub read_watch: Arc<ReadWatch>,
    /// What each tenant may use, and what it uses.
    pub tenants: Arc<Tenants>,
    /// What the admin page needs beside the present state.
    pub dashboard: DashboardState,
    /// Memory for samples that are read ahead of being sent.
    pub read_ahead: Arc<ReadAhead>,
    /// The tasks that outlive a request.
    pub tasks: TaskTracker,
    /// Registers and unregisters datasets.
    pub catalog: Catalog,
    /// Which server of the cluster has which job.
    pub groups: Arc<Groups>,
    /// The server's part of its cluster.
    pub cluster: Arc<ClusterState>,
    /// A short hash of each setting that should be the same on all servers of a cluster.
    pub shared_settings: BTreeMap<String, String>,
    /// Reads bytes of versions, from this server's cache, other servers and origins.
    pub reads: Arc<Reads>,
    /// The open connections.
    pub connections: Arc<Connections>,
    /// The memory for heads and bodies of requests.
    pub request_memory: Arc<RequestMemory>,
    /// The server's own URL: `http(s)://host:port`, or `unix:PATH` if it listens on its socket only.
    pub url: String,
    /// Jobs that were displaced, and whose accounts were not folded yet.
    displaced: AtomicUsize,
    phase: AtomicU8,
    started: Instant,
    last_request_ns: AtomicU64,
    state: StateDir,
}

impl Server {
    /// Loads the state and creates all parts. The disk tier is opened later. `s3_listen` is the address of
    /// the S3 door's listener.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn open(
        config: &Config,
        url: String,
        s3_listen: Option<SocketAddr>,
        tasks: TaskTracker,
    ) -> Result<Arc<Self>, StartError> {
        let limits = config.limits;
        let auth = Auth::open(config.auth_tokens.as_deref(), config.socket_admins.clone())?;
        let tls = config.tls.clone().map(Tls::open).transpose()?;
        let s3 = config.s3.as_ref().zip(s3_listen);
        let s3 = s3.map(|(settings, listen)| S3Door::open(settings, listen)).transpose()?;
        let tenants = Tenants::new(limits, auth.tenants());
        let state = StateDir::open(&config.state_dir)?;
        let cluster = Arc::new(ClusterState::open(&config.cluster, state.path(), &url)?);
        let registrations = Arc::new(Registrations::open(&state, limits.datasets)?);
        let origin_limits = OriginLimits {
            requests_max: limits.origin_requests,
            requests_per_origin: Some(limits.origin_requests_per_origin),
            io_timeout: limits.origin_timeout(),
            ..OriginLimits::default()
        };
        let origins = Origins::new(config.origins.clone(), origin_limits).map_err(StartError::Origins)?;
        let publish = PublishPlace::new(config);
        let mut local_dirs = config.local_dirs.clone();
        if let (PublishPlace::OwnMachine(dir), false) = (&publish, local_dirs.is_empty()) {
            state.create_dir(TABLES_DIR)?;
            local_dirs
                .push(LocalDir::own(dir).map_err(|error| StateError::Open { path: dir.clone(), error })?);
        }
        let accounts = Arc::new(Accounts::default());
        let savings = SavingsFile::open(state.path(), &accounts.costs);
        let credentials = HeldCredentials::new(config, auth.own_user());
        let allowed = Allowlist::new(origins.clone(), &local_dirs, config.auth_tokens.is_none())
            .taking_credentials(is_personal(config));
        let versions = Versions::new(
            allowed,
            Arc::clone(&registrations),
            VersionLimits {
                tables_bytes: limits.tables_bytes,
                local_tables: local_tables::open(
                    &config.cache.dir,
                    limits.tables_disk_bytes,
                    MountMemory::new(&config.cache.dir, &state.path().join(CACHE_RECORDS)),
                ),
                versions: limits.versions,
                root_lookups: u32::try_from(limits.root_lookups).unwrap_or(u32::MAX),
                call_timeout: limits.homes_timeout(),
            },
            Arc::clone(&accounts),
            LearnedNames::open(state.path())?,
            tasks.clone(),
        );
        let read_watch = ReadWatch::new(config.slow_read);
        let store_limits = StoreLimits {
            memory_bytes: limits.store_bytes(),
            deadline: limits.io_timeout,
            attempts: READ_ATTEMPTS,
        };
        let disk = (config.cache.size != Amount::Bytes(0)).then(|| DiskTier::new(limits.append_bytes()));
        let store = Store::new(store_limits, disk, tasks.clone());
        let chunk_reads = ChunkReads::new(
            Arc::clone(&store),
            Arc::clone(&versions),
            Arc::clone(&tenants),
            Arc::clone(&cluster),
            tasks.clone(),
            Arc::clone(&read_watch),
        );
        let seal_context = Arc::new(SealContext {
            versions: Arc::clone(&versions),
            registrations: Arc::clone(&registrations),
            origins: origins.clone(),
            dir: state.path().join(SEALS_DIR),
            parallel: (limits.origin_requests / 8).clamp(1, SEAL_PARALLEL_MAX),
        });
        let requests = Arc::new(RequestMetrics::new());
        let read_ahead = ReadAhead::new(limits.read_ahead_bytes());
        let reads = Reads {
            store: Arc::clone(&store),
            versions: Arc::clone(&versions),
            chunks: Arc::clone(&chunk_reads),
            tenants: Arc::clone(&tenants),
            read_ahead: Arc::clone(&read_ahead),
            metrics: Arc::clone(&requests),
            tasks: tasks.clone(),
        };
        let shares = Arc::new(Shares::default());
        let warmup_context = WarmupContext {
            store: Arc::clone(&store),
            shares: Arc::clone(&shares),
            reads: Arc::clone(&chunk_reads),
            cluster: Arc::clone(&cluster),
            accounts: Arc::clone(&accounts),
            tenants: Arc::clone(&tenants),
            watch: Arc::clone(&read_watch),
            parallel: limits.batch_ahead().min(limits.origin_requests.div_ceil(4)),
        };
        let sweep = SweepContext {
            store: Arc::clone(&store),
            reads: Arc::clone(&chunk_reads),
            accounts: Arc::clone(&accounts),
            shares: Arc::clone(&shares),
            watch: Arc::clone(&read_watch),
            tasks: tasks.clone(),
            memory_bytes: limits.memory_bytes / 2,
            fetches_max: limits.origin_requests.div_ceil(2),
            fetch_bytes_max: limits.memory_bytes / 4,
            recorder: config.trace_dir.clone().map(|dir| Recorder::new(dir, limits.trace_bytes)),
            sweeps: AtomicUsize::new(0),
            counts: Default::default(),
        };
        let prefetch = PrefetchContext {
            store: Arc::clone(&store),
            versions: Arc::clone(&versions),
            reads: Arc::clone(&chunk_reads),
            watch: Arc::clone(&read_watch),
            tasks: tasks.clone(),
            pool: PrefetchPool::new(
                limits.prefetch_bytes,
                limits.origin_requests - limits.origin_requests / 4,
            ),
            lease_ttl: limits.lease_ttl,
        };
        let job_context = JobContext {
            sweep: Arc::new(sweep),
            prefetch: Arc::new(prefetch),
            tenants: Arc::clone(&tenants),
            tasks: tasks.clone(),
            lease_ttl: limits.lease_ttl,
            ledger_bytes: limits.ledger_bytes,
            job_ttl: limits.job_ttl,
            since: Instant::now(),
            lease_clock: LeaseClock::new(),
            disk_reads: Default::default(),
            counts: Default::default(),
        };
        let registry = Registry::open(state.path(), job_context).map_err(|error| StartError::Io {
            what: format!("open the jobs below {}", state.path().display()),
            error,
            hint: "check the permissions of --state-dir",
        })?;
        let prometheus = config.prometheus.clone().map(Prometheus::new).transpose();
        let prometheus = prometheus.map_err(|e| StartError::Prometheus(e.to_string()))?;
        let access_changes = watch::Sender::new(());
        let (changes, of) = (access_changes.clone(), Arc::clone(&versions));
        let effects: Effects = Box::new(move |applied| {
            applied.domains.iter().for_each(|domain| of.forget_unknown(domain));
            if applied.has_ended {
                changes.send_replace(());
            }
        });
        let request_memory = RequestMemory::new(limits.request_memory_bytes());
        let table = TableLimits {
            tcp: limits.connections,
            unix: limits.socket_connections,
            per_caller: limits.connections_per_caller,
            probes: PROBES_MAX,
        };
        Ok(Arc::new(Server {
            limits,
            auth,
            tls,
            s3,
            hosts: config.hosts.clone(),
            cache: config.cache.clone(),
            store,
            warmups: Warmups::new(warmup_context, tasks.clone()),
            listings: Listings::new(Arc::clone(&seal_context), tasks.clone()),
            seals: Seals::new(seal_context, tasks.clone()),
            shares,
            allocator: Allocator::default(),
            mounts: AnnouncedMounts::new(Arc::clone(&tenants)),
            publish,
            registry,
            reclaims: Reclaims::new(limits.lease_ttl),
            groups: Arc::new(Groups::new(&cluster, state.path())),
            catalog: Catalog::new(Arc::clone(&registrations), &cluster, state.path(), effects),
            access_changes,
            origins,
            credentials,
            versions,
            registrations,
            live_jobs: LiveJobs::new(limits.jobs, limits.job_ttl),
            accounts,
            savings,
            requests,
            read_watch,
            dashboard: DashboardState::new(prometheus),
            tenants,
            read_ahead,
            tasks,
            connections: Connections::new(table, Arc::clone(&request_memory)),
            request_memory,
            cluster,
            shared_settings: config.shared(),
            reads: Arc::new(reads),
            url,
            displaced: AtomicUsize::new(0),
            phase: AtomicU8::new(Phase::Starting as u8),
            started: Instant::now(),
            last_request_ns: AtomicU64::new(0),
            state,
        }))
    }

    /// Returns the configuration with which the disk tier is opened now.
    ///
    /// # Errors
    /// A text that says what is wrong with the directory's file system.
    pub fn disk_config(&self) -> Result<DiskConfig, String> {
        let CacheConfig { dir, size, free_floor, policy, .. } = &self.cache;
        let mount_memory = MountMemory::new(dir, &self.state.path().join(CACHE_RECORDS));
        // Before the size: what is mounted below has another size.
        mount_memory.check().map_err(|e| e.to_string())?;
        let room = FsSpace::at(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        let size_max = size.of(room.available.saturating_add(room.own));
        if size_max < CACHE_MIN {
            let spare = ByteSize(room.available);
            return Err(format!(
                "cache.size = {size} of the {spare} free at {} is less than 16MiB",
                dir.display()
            ));
        }
        if size_max > room.total {
            let (size, total) = (ByteSize(size_max), ByteSize(room.total));
            tracing::warn!(
                %size, %total,
                "cache.size is more than the whole file system; cache.free_floor bounds the cache"
            );
        }
        Ok(DiskConfig {
            dir: dir.clone(),
            size_max,
            free_floor: free_floor.of(room.total),
            slab_bytes: None,
            policy: *policy,
            seed: rand::random(),
            files_max: SLABS_MAX,
            mount_memory: Some(mount_memory),
        })
    }

    #[must_use]
    pub fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            0 => Phase::Starting,
            1 => Phase::Ready,
            _ => Phase::Draining,
        }
    }

    /// Enters a phase. There is no way back to an earlier one.
    pub fn enter(&self, phase: Phase) {
        self.phase.fetch_max(phase as u8, Ordering::AcqRel);
        self.access_changes.send_replace(());
    }

    /// Returns the name of the phase.
    #[must_use]
    pub fn phase_word(&self) -> &'static str {
        match self.phase() {
            Phase::Starting => "starting",
            Phase::Ready => "ready",
            Phase::Draining => "draining",
        }
    }

    /// Returns the time since the start.
    #[must_use]
    pub fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// Returns the nanoseconds since the start.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        u64::try_from(self.uptime().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Records that a request came.
    pub fn touch(&self) {
        self.last_request_ns.fetch_max(self.now_ns(), Ordering::Relaxed);
    }

    /// Returns what the server does now.
    #[must_use]
    pub fn activity(&self) -> Activity {
        Activity {
            last_request_ns: self.last_request_ns.load(Ordering::Relaxed),
            running: self.tenants.requests.used(),
            mounts: self.mounts.count(self.now_ns()) as u64,
            epochs: self.registry.stats().epochs_open,
            warmups: self.warmups.stats().live + self.seals.stats().running + self.listings.running(),
        }
    }

    /// Returns the weight of this server among the others of its cluster: its disk in MiB.
    #[must_use]
    pub fn cluster_weight(&self) -> Weight {
        if self.cache.size == Amount::Bytes(0) {
            return Weight::Exact(0);
        }
        let mib = |config: DiskConfig| u32::try_from(config.size_max >> 20).unwrap_or(u32::MAX);
        self.disk_config().map_or(Weight::Unknown, |config| Weight::About(mib(config)))
    }

    /// Divides the disk by the part of all chunks that this server owns, until `stop`.
    pub async fn follow_ring(&self, stop: CancellationToken) {
        let mut views = self.cluster.subscribe();
        loop {
            let (weight, all) = views.borrow_and_update().core.ring().weights(self.cluster.own_id());
            self.shares.set_part(Part::new(weight, all));
            tokio::select! {
                changed = views.changed() => if changed.is_err() { return },
                () = stop.cancelled() => return,
            }
        }
    }

    /// Returns the identities at the disk tier of all datasets of a domain. Those of their sweeps are not
    /// among them.
    #[must_use]
    pub fn datasets_of(&self, domain: &Domain) -> HashSet<DatasetId> {
        let all = self.registrations.list(domain);
        all.iter().map(|r| DatasetId::of(domain, &r.dataset.name)).collect()
    }

    /// Returns the names of all datasets, by their ids at the disk tier. Those of sweeps are not among them.
    #[must_use]
    pub fn share_names(&self) -> HashMap<DatasetId, ShareName> {
        let named = |domain: &Domain, name: &DatasetName| {
            (DatasetId::of(domain, name), (domain.clone(), name.clone()))
        };
        self.registrations.all().iter().map(|r| named(&r.domain, &r.dataset.name)).collect()
    }

    /// Returns what the datasets of some domains are, what the cache holds of them, and what it saved.
    #[must_use]
    pub fn dataset_uses(&self, wanted: impl Fn(&Domain) -> bool) -> Vec<DatasetUse> {
        let tier = self.store.disk().map(|d| d.engine().map(|t| t.stats()));
        // By the dataset of plain readers: a chunk of a sweep is theirs, too.
        let on_disk: Option<HashMap<DatasetId, (u64, u64)>> = tier.map(|tier| {
            let mut all: HashMap<DatasetId, (u64, u64)> = HashMap::new();
            for d in tier.iter().flat_map(|t| &t.datasets) {
                let (bytes, chunks) = all.entry(d.plain).or_default();
                *bytes += d.bytes;
                *chunks += d.chunks;
            }
            all
        });
        let (bytes, sizes) = (self.accounts.costs.datasets(), self.versions.sizes());
        let changed = self.versions.changed_objects().counts();
        let mut uses = Vec::new();
        for entry in self.registrations.all().iter().filter(|r| wanted(&r.domain)) {
            let key = (entry.domain.clone(), entry.dataset.name.clone());
            let (size, counted) = (sizes.get(&key), bytes.get(&key).copied().unwrap_or_default());
            let cached = on_disk
                .as_ref()
                .map(|on_disk| on_disk.get(&DatasetId::of(&key.0, &key.1)).copied().unwrap_or_default());
            let (cached_bytes, cached_chunks) = cached.unwrap_or_default();
            uses.push(DatasetUse {
                changed_objects: changed.get(&key).copied().unwrap_or(0),
                domain: key.0,
                dataset: key.1,
                version_bytes: dataset_bytes(entry, size),
                layout_bytes: size.map(|s| s.layout_bytes(cached_bytes, cached_chunks)),
                cached_bytes: cached.map(|cached| cached.0),
                delivered_bytes: counted.delivered,
                origin_bytes: counted.read,
                avoided_bytes: counted.avoided,
            });
        }
        uses.sort_by(|a, b| (&a.dataset, &a.domain).cmp(&(&b.dataset, &b.domain)));
        uses
    }

    /// Returns the state directory.
    #[must_use]
    pub fn state_dir(&self) -> &Path {
        self.state.path()
    }

    /// Returns this server's part of the tenants' quotas on disk, and the bytes that their datasets have
    /// there now.
    #[must_use]
    pub fn resident_quotas(&self) -> Vec<(Tenant, TenantQuota)> {
        let part = self.shares.part();
        let resident = |q: &Quota| Some(part.of_bytes(q.resident?));
        let quotas: Vec<_> =
            self.auth.quotas().into_iter().filter_map(|(t, q)| Some((t, resident(&q)?))).collect();
        if quotas.is_empty() {
            return Vec::new();
        }
        let tier = self.store.disk().and_then(|d| d.engine()).map(|t| t.stats());
        // By the dataset of plain readers: what it and its sweeps have.
        let mut used: HashMap<DatasetId, Vec<(DatasetId, u64)>> = HashMap::new();
        for d in tier.iter().flat_map(|t| &t.datasets) {
            used.entry(d.plain).or_default().push((d.dataset, d.bytes));
        }
        let all = self.registrations.all();
        let of = |tenant: &Tenant| {
            let mut ids: BTreeMap<DatasetId, QuotaUse> = BTreeMap::new();
            for r in all.iter().filter(|r| r.tenant == *tenant) {
                let plain = DatasetId::of(&r.domain, &r.dataset.name);
                let live = self.registry.sweeps_of(&r.domain, &r.dataset.name);
                let of_pool = |dataset, bytes| (dataset, QuotaUse { dataset, plain, bytes });
                ids.extend(live.into_iter().chain([plain]).map(|id| of_pool(id, 0)));
                ids.extend(used.get(&plain).into_iter().flatten().map(|&(id, bytes)| of_pool(id, bytes)));
            }
            ids.into_values().collect()
        };
        quotas.into_iter().map(|(t, quota)| (t.clone(), (quota, of(&t)))).collect()
    }

    /// Returns what the administrator set of each tenant's share.
    fn tenant_shares(&self) -> BTreeMap<Tenant, TenantShare> {
        let default = TenantShare::default();
        let share = |q: &Quota| TenantShare {
            weight: q.weight.unwrap_or(default.weight),
            min_share: q.min_share.unwrap_or(default.min_share),
        };
        self.auth.quotas().iter().map(|(tenant, quota)| (tenant.clone(), share(quota))).collect()
    }

    /// Returns the least bytes that the administrator set for all tenants, in sum.
    #[must_use]
    pub fn tenant_min_shares(&self) -> u64 {
        self.tenant_shares().values().map(|share| share.min_share).fold(0, u64::saturating_add)
    }

    /// Returns the bytes of the disk that are divided among datasets. `None` without a disk tier, and under a
    /// cache policy without shares.
    #[must_use]
    pub fn divided_capacity(&self) -> Option<u64> {
        let tier = self.store.disk()?.engine()?;
        (tier.policy() == Policy::Fletch).then(|| tier.capacity())
    }

    /// Decides about the shares of origins, and about those of the disk if that is due. Takes up to 50 ms
    /// with 200 datasets.
    pub fn allocate_if_due(&self) {
        self.tenants.set_stream_weights(self.registry.stream_weights());
        let is_due = || self.allocator.is_due(self.registry.running(), self.cache.decision_interval);
        if self.divided_capacity().is_none() || !is_due() {
            return;
        }
        let limits = AllocationLimits { tenants: self.tenant_shares(), plain: self.shares.plain() };
        if self.allocator.decide(&self.registry.readers(), &limits) {
            self.shares.divide_anew();
        }
    }

    /// Reloads the tokens file, the files of TLS and the key of the S3 door if they changed. Blocking.
    pub fn reload_files(&self) {
        if let Some(tls) = &self.tls {
            tls.reload();
        }
        if let Some(keys) = self.s3.as_ref().and_then(|door| door.keys.as_ref()) {
            keys.reload();
        }
        if self.auth.reload() {
            // The tenants and their quotas may have changed.
            self.tenants.set_known(self.auth.tenants());
            self.shares.forget_applied();
            self.access_changes.send_replace(());
        }
    }

    /// Returns the live job of a request whose access was decided.
    ///
    /// A tenant at its limit makes room among its own idle jobs. Their accounts move to the job `expired`.
    ///
    /// # Errors
    /// [`TooManyJobs`], which is counted.
    pub fn live_job(&self, tenant: &Tenant, name: &JobName) -> Result<Arc<LiveJob>, TooManyJobs> {
        let most = JobLimits {
            jobs: self.tenants.jobs_max(tenant),
            labels: self.tenants.job_labels_max(LABELS_MAX),
        };
        let touched = self.live_jobs.touch(tenant, name, most, self.now_ns());
        let (job, displaced) =
            touched.inspect_err(|_| self.tenants.count_refusal(tenant, TenantLimit::Jobs))?;
        // Folding looks at every account, so that many displaced jobs share one fold.
        if displaced > 0
            && self.displaced.fetch_add(displaced, Ordering::Relaxed) + displaced >= DISPLACED_MAX
        {
            self.fold_accounts();
        }
        Ok(job)
    }

    fn fold_accounts(&self) {
        self.displaced.store(0, Ordering::Relaxed);
        self.accounts.fold(|tenant, name| self.live_jobs.is_live(tenant, name));
    }

    /// Forgets jobs that were idle for too long, and moves their accounts to the job `expired`.
    pub fn expire_jobs(&self) {
        self.live_jobs.expire(self.now_ns());
        self.fold_accounts();
    }
}
