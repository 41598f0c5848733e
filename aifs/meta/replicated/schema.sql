-- The metadata of a cluster: the map, the feed of its changes, the sessions of hosts;
-- docs/design/replicated.md says how they work together. Plain SQL and PL/pgSQL, for PostgreSQL 14
-- and later. This file is run once, in a database that is empty otherwise, as one transaction.
--
-- Functions that change something return a status first:
--     0 done
--     1 conflict: others have changed what the caller had read; nothing is changed
--     2 lapsed: the lease of the session is over; a beat renews it
--     3 ended: the session is no more
--     4 recovering: the database has crashed; hosts put back what it has lost (restore, reopen)
--     5 trimmed: the feed does not go back so far; or, of a commit, not as far as the replica
--     6 taken: a live session has this name
-- Sessions commit asynchronously (synchronous_commit = off); beats and whatever begins or ends a
-- session are synchronous, which makes all that is before them in the log durable, too.

create schema aifs;

create table aifs.version (number int not null);  -- of this schema
insert into aifs.version values (2);

create table aifs.map (
    key bytea primary key,
    value bytea not null
) with (fillfactor = 85);
alter table aifs.map alter value set storage external;  -- records are small, and do not compress

create table aifs.feed (
    seq bigint primary key,         -- ascending without gaps
    session int not null,           -- whose change it is
    number bigint not null,         -- of the commit in its session, ascending
    absolute int not null,          -- keys[1:absolute] were put or deleted, the others added to or patched
    keys bytea[] not null,
    vals bytea[] not null           -- what they are now; null: deleted
);
alter table aifs.feed alter keys set storage external, alter vals set storage external;

create table aifs.session (
    id int generated always as identity primary key,  -- never comes back
    asking text not null,           -- names the request that has begun it, asked for once or again
    name text not null,             -- of the host
    host int not null,              -- its number, the same for all sessions of this name; from 1 on
    address text not null,          -- where other hosts reach it: address:port
    began timestamptz not null default clock_timestamp(),
    lease_end timestamptz not null,
    steady timestamptz not null default clock_timestamp(),  -- no two beats since then were half a lease apart
    sought timestamptz,             -- when another host asked for its name last, its lease being over
    sought_since timestamptz,       -- and since when it has asked without a break of half a lease
    cursor bigint not null,         -- its replica has the feed up to here
    shown bigint,                   -- so has its kernel; null: it joins, and answers nobody yet
    joined bigint,                  -- ascends in the order in which sessions have joined; null as ``shown``
    number bigint not null default 0,  -- of the last commit that it asked for
    ended text                      -- why; null: it goes on
);

create index session_live on aifs.session (id) where ended is null;

create table aifs.membership (version bigint not null);  -- counts what sessions begin, join and end
insert into aifs.membership values (0);

-- These two are emptied by a crash of the database (or when a standby takes over): so an empty
-- ``head`` says that the last commits may be lost.
create unlogged table aifs.head (seq bigint not null);   -- one row: the last number of the feed
insert into aifs.head values (0);
create unlogged table aifs.report (                      -- who has put back what the database has lost
    session int primary key,                        -- 0: somebody who has none waits for it
    since timestamptz not null default clock_timestamp(),
    at timestamptz not null default clock_timestamp()  -- when it asked last
);


-- Counters are 8 bytes, little-endian, signed.
create function aifs.number_of(counter bytea) returns bigint language sql immutable as $$
    select get_byte(counter, 0)::bigint | (get_byte(counter, 1)::bigint << 8)
        | (get_byte(counter, 2)::bigint << 16) | (get_byte(counter, 3)::bigint << 24)
        | (get_byte(counter, 4)::bigint << 32) | (get_byte(counter, 5)::bigint << 40)
        | (get_byte(counter, 6)::bigint << 48) | (get_byte(counter, 7)::bigint << 56)
$$;

create function aifs.counter_of(number bigint) returns bytea language plpgsql immutable as $$
declare
    big bytea := int8send(number);
begin
    return substr(big, 8, 1) || substr(big, 7, 1) || substr(big, 6, 1) || substr(big, 5, 1)
        || substr(big, 4, 1) || substr(big, 3, 1) || substr(big, 2, 1) || substr(big, 1, 1);
end $$;


-- Why a session that was not found may do nothing.
create function aifs.refusal(me int) returns int language sql as $$
    select case when exists (select from aifs.session s where s.id = me and s.ended is null)
        then 2 else 3 end
$$;


-- Rows of the feed behind ``base``, the first ``count`` of them, behind a row with the status and
-- the head.
create function aifs.fetch(base bigint, count int) returns table (
    status int, seq bigint, session int, number bigint, absolute int, keys bytea[], vals bytea[]
) language plpgsql as $$
declare
    last bigint;
begin
    select h.seq into last from aifs.head h;
    status := case when not found then 4
        when base < last and not exists (select from aifs.feed f where f.seq = base + 1) then 5
        else 0 end;
    seq := last;
    return next;
    if status = 0 and base < last then
        return query select null::int, f.* from aifs.feed f
            where f.seq > base and f.seq <= last order by f.seq limit count;
    end if;
end $$;


-- One change set of a session whose replica has the feed up to ``base``: keys that were read,
-- read loosely, and ranges [starts, ends) that were read; keys[1:puts] are put, the others
-- deleted (their ``vals`` are null); counters to add to; parts to patch, in their order.
--
-- The first row has the status and, if it is done, the number of the change set. Others follow
-- with what the feed has behind ``base``, at most some hundred of them. A commit whose answer was
-- lost is asked for again with its ``nr``: it is done once, and told of as then.
create function aifs.commit(
    me int, nr bigint, base bigint,
    reads bytea[], loose bytea[], starts bytea[], ends bytea[],
    puts int, keys_ bytea[], vals_ bytea[],
    add_keys bytea[], deltas bigint[], patch_keys bytea[], offsets int[], parts bytea[]
) returns table (
    status int, seq bigint, session int, number bigint, absolute int, keys bytea[], vals bytea[]
) language plpgsql as $$
declare
    mine bigint;
    made bytea;
    hard int := cardinality(keys_);
begin
    -- The row of ``head`` is locked from here on: commits come one after the other.
    update aifs.head h set seq = h.seq + 1 returning h.seq into mine;
    if not found then
        status := 4;
        return next;
        return;
    end if;
    if base >= mine then
        update aifs.head h set seq = mine - 1;
        status := 5;
        return next;
        return;
    end if;
    update aifs.session s set number = nr
        where s.id = me and s.number < nr and s.ended is null
        and s.lease_end > clock_timestamp();
    if not found then
        update aifs.head h set seq = mine - 1;
        select f.seq into seq from aifs.feed f
            where f.seq > base and f.session = me and f.number = nr;
        if found then
            status := 0;
        elsif exists (select from aifs.session s where s.id = me and s.ended is null
                and s.number >= nr) then
            status := 1;  -- that is what it was told, or would have been
        else
            status := aifs.refusal(me);
        end if;
        mine := mine - 1;
    elsif base < mine - 1 then
        with changed as (
            select k.key, k.at <= f.absolute as absolute
            from aifs.feed f cross join unnest(f.keys) with ordinality k(key, at)
            where f.seq > base
        ) select case when
            exists (select from changed c join unnest(reads) r(key) on c.key = r.key)
            or exists (select from changed c join unnest(loose) r(key) on c.key = r.key
                where c.absolute)
            or exists (select from changed c join unnest(starts, ends) r(first, beyond)
                on c.key >= r.first and c.key < r.beyond)
            then 1 else 0 end into status;
        if status = 1 then
            update aifs.head h set seq = mine - 1;
            mine := mine - 1;
        end if;
    else
        status := 0;
    end if;
    if status = 0 and seq is null then
        if puts > 0 then
            insert into aifs.map select p.key, p.value
                from unnest(keys_[1:puts], vals_[1:puts]) p(key, value)
                on conflict on constraint map_pkey do update set value = excluded.value;
        end if;
        if puts < hard then
            delete from aifs.map m where m.key = any(keys_[puts + 1:]);
        end if;
        for i in 1..cardinality(add_keys) loop
            insert into aifs.map as m values (add_keys[i], aifs.counter_of(deltas[i]))
                on conflict on constraint map_pkey do update
                set value = aifs.counter_of(aifs.number_of(m.value) + deltas[i])
                returning m.value into made;
            keys_ := keys_ || add_keys[i];
            vals_ := vals_ || made;
        end loop;
        for i in 1..cardinality(patch_keys) loop
            update aifs.map m set value = overlay(m.value placing parts[i] from offsets[i] + 1)
                where m.key = patch_keys[i] returning m.value into made;
            if not found then
                raise 'a patch of what is not there';
            end if;
            keys_ := keys_ || patch_keys[i];
            vals_ := vals_ || made;
        end loop;
        insert into aifs.feed values (mine, me, nr, hard, keys_, vals_);
        seq := mine;
        mine := mine - 1;
    end if;
    return next;
    if base < mine then
        return query select null::int, f.* from aifs.feed f
            where f.seq > base and f.seq <= mine order by f.seq limit 512;
    end if;
end $$;


-- Sessions. Their callers commit synchronously, but for ``members`` and ``behind``.
--
-- A lease that is over is no death: the database itself may have been away, and the questions that
-- waited for it are the first to be carried out when it is back. So a session ends for its silence
-- only if the database has been heard by somebody else all through a lease, without a break of half
-- of one, until now.

-- A new session for the host of this name. ``former``: the number of its last one, which ends; 0
-- if it had none. Another session of this name is a refusal (6), with the address of its host and
-- what is left of its lease; it ends when its lease is over and it was asked for for a whole lease. ``base``: what the
-- replica of the host has of the feed; null: nothing, it copies the map. Nobody waits for the
-- session before its first beat, after which the host hears of all up to the head. ``asking_``: the
-- same where the answer was lost, and it is asked for again: what was begun then ends. A refusal
-- because of a lease that is over is asked for again until that session ends, or beats.
create function aifs.begin(
    asking_ text, name_ text, address_ text, former int, base bigint, lease_s float,
    out status int, out id int, out host int, out head bigint, out address text,
    out lease_left_s float
) language plpgsql as $$
begin
    lock table aifs.session in share row exclusive mode;
    select h.seq into head from aifs.head h;
    if not found then
        status := 4;
        return;
    end if;
    -- The newest row of each name stays: it has the number of the host.
    delete from aifs.session s where s.name = name_ and s.ended is not null
        and s.id < (select max(l.id) from aifs.session l where l.name = name_);
    update aifs.session s set sought = clock_timestamp(), sought_since = case
            when s.sought > clock_timestamp() - make_interval(secs => lease_s / 2)
            then s.sought_since else clock_timestamp() end
        where s.name = name_ and s.ended is null and s.lease_end <= clock_timestamp();
    update aifs.session s set ended = 'its host has begun another one'
        where s.name = name_ and s.ended is null
        and (s.id = former or s.asking = asking_ or s.lease_end <= clock_timestamp()
            and s.sought_since <= clock_timestamp() - make_interval(secs => lease_s));
    select 6, s.address, extract(epoch from s.lease_end - clock_timestamp())
        into status, address, lease_left_s
        from aifs.session s where s.name = name_ and s.ended is null;
    if found then
        return;
    end if;
    select coalesce(max(s.host) filter (where s.name = name_), coalesce(max(s.host), 0) + 1)
        into host from aifs.session s;
    insert into aifs.session as s (asking, name, host, address, lease_end, cursor) values (
        asking_, name_, host, address_, clock_timestamp() + make_interval(secs => lease_s),
        least(base, head)
    ) returning s.id into id;
    update aifs.membership set version = version + 1;
    status := 0;
end $$;


-- Renews the lease, also one that is over; says what the host has of the feed, and has shown. All
-- that was committed before, by anybody, is durable when this is.
create function aifs.beat(
    me int, cursor_ bigint, shown_ bigint, lease_s float,
    out status int, out head bigint, out members bigint, out ended text
) language plpgsql as $$
begin
    update aifs.session s set lease_end = clock_timestamp() + make_interval(secs => lease_s),
        steady = case when s.lease_end > clock_timestamp() + make_interval(secs => lease_s / 2)
            then s.steady else clock_timestamp() end,
        cursor = greatest(s.cursor, cursor_), shown = greatest(s.shown, shown_)
        where s.id = me and s.ended is null;
    if not found then
        status := 3;
        select s.ended into ended from aifs.session s where s.id = me;
        return;
    end if;
    if shown_ is not null and exists (
            select from aifs.session s where s.id = me and s.joined is null) then
        update aifs.membership set version = version + 1;
        update aifs.session s set joined = (select version from aifs.membership) where s.id = me;
    end if;
    select h.seq into head from aifs.head h;
    status := case when found then 0 else 4 end;
    select version into members from aifs.membership;
end $$;


-- Ends a session, whoever asks, for the reason that is told; whether it had not ended.
create function aifs.end_session(who int, reason text) returns boolean language plpgsql as $$
begin
    update aifs.session s set ended = reason where s.id = who and s.ended is null;
    if found then
        update aifs.membership set version = version + 1;
    end if;
    return found;
end $$;


-- Ends the sessions whose lease is over, if ``me`` has had its own without a break for all of a
-- lease, and the database does not recover; how many.
create function aifs.end_silent(me int, lease_s float) returns int language plpgsql as $$
declare
    count int;
begin
    update aifs.session s set ended = 'its lease was over'
        where s.ended is null and s.lease_end <= clock_timestamp()
        and exists (select from aifs.head)
        and exists (select from aifs.session m where m.id = me and m.ended is null
            and m.lease_end > clock_timestamp() + make_interval(secs => lease_s / 2)
            and m.steady <= clock_timestamp() - make_interval(secs => lease_s));
    get diagnostics count = row_count;
    if count > 0 then
        update aifs.membership set version = version + 1;
    end if;
    return count;
end $$;


-- The sessions that have not ended.
create function aifs.members() returns table (
    id int, host int, name text, address text, age_s float, lease_left_s float, cursor bigint,
    shown bigint, joined bigint
) language sql as $$
    select s.id, s.host, s.name, s.address, extract(epoch from clock_timestamp() - s.began)::float,
        extract(epoch from s.lease_end - clock_timestamp())::float, s.cursor, s.shown, s.joined
        from aifs.session s where s.ended is null order by s.id
$$;


-- The sessions whose lease is not over and that have not shown ``seq``.
create function aifs.behind(upto bigint) returns table (id int) language sql as $$
    select s.id from aifs.session s
        where s.ended is null and s.shown < upto and s.lease_end > clock_timestamp()
$$;


-- Removes rows of the feed that no session needs, but for the last ``keep``, which serve hosts that
-- come back; how many.
create function aifs.trim(keep int) returns bigint language plpgsql as $$
declare
    removed bigint;
    bound bigint;
begin
    select h.seq - keep into bound from aifs.head h;
    if not found then
        return 0;  -- what hosts put back goes behind the last row
    end if;
    delete from aifs.feed f where f.seq <= least(
        (select min(s.cursor) from aifs.session s where s.ended is null), bound
    );
    get diagnostics removed = row_count;
    return removed;
end $$;


-- After a crash, when ``head`` is empty.

-- The last number of the feed that the database has.
create function aifs.last() returns bigint language sql as $$
    select coalesce(max(f.seq), 0) from aifs.feed f
$$;


-- Puts back a row of the feed that the database has lost, which ``me`` has in its replica; not if
-- the database has gone on.
create function aifs.restore(
    me int, seq_ bigint, session_ int, number_ bigint, absolute_ int, keys_ bytea[], vals_ bytea[]
) returns void language plpgsql as $$
begin
    lock table aifs.report in exclusive mode;
    if exists (select from aifs.head) or aifs.last() <> seq_ - 1
        or aifs.refusal(me) = 3 then
        return;
    end if;
    -- Of a key that was patched several times the last value counts.
    insert into aifs.map select distinct on (p.key) p.key, p.value
        from unnest(keys_, vals_) with ordinality p(key, value, at) where p.value is not null
        order by p.key, p.at desc
        on conflict on constraint map_pkey do update set value = excluded.value;
    delete from aifs.map m using unnest(keys_, vals_) p(key, value)
        where m.key = p.key and p.value is null;
    insert into aifs.feed values (seq_, session_, number_, absolute_, keys_, vals_);
    update aifs.session s set number = greatest(s.number, number_) where s.id = session_;
end $$;


-- ``me`` has put back all that it had (0: it has no session, and waits). Whether the database goes
-- on: it does when all sessions have, or when one has asked for ``patience_s``; sessions that have
-- not by then end, as others go on without what they may have had. Where nobody has asked for a fifth
-- of that time the database was away, and all of it begins anew.
create function aifs.reopen(me int, patience_s float) returns boolean language plpgsql as $$
begin
    lock table aifs.report in exclusive mode;
    if exists (select from aifs.head) then
        return true;
    end if;
    update aifs.report r set since = clock_timestamp()
        where (select max(l.at) from aifs.report l)
            < clock_timestamp() - make_interval(secs => patience_s / 5);
    insert into aifs.report as r (session) values (me)
        on conflict on constraint report_pkey do update set at = clock_timestamp();
    if exists (select from aifs.session s where s.ended is null
            and not exists (select from aifs.report r where r.session = s.id))
        and (select min(r.since) from aifs.report r)
            > clock_timestamp() - make_interval(secs => patience_s) then
        return false;
    end if;
    update aifs.session s set ended = 'it did not come back after a crash of the database'
        where s.ended is null and not exists (select from aifs.report r where r.session = s.id);
    update aifs.membership set version = version + 1;
    insert into aifs.head values (aifs.last());
    delete from aifs.report;
    return true;
end $$;
