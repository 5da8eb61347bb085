// The application of the suite's pods: a server, and a client that repeats nothing and counts what fails.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/credentials/xds"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/reflection"
	reflect "google.golang.org/grpc/reflection/grpc_reflection_v1"
	_ "google.golang.org/grpc/xds"
)

func main() {
	switch os.Args[1] {
	case "serve":
		serve()
	case "load": // load [-hold DURATION] TARGET...: until standard input ends
		load(os.Args[2:])
	case "get": // get URL: prints the answer; xds:///HOST:PORT asks for gRPC's health check without Envoy
		body, err := (&client{url: os.Args[2]}).get()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Stdout.Write(body)
	case "copy": // copy FROM TO
		data, err := os.ReadFile(os.Args[2])
		if err == nil {
			err = os.WriteFile(os.Args[3], data, 0o644)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	case "healthy": // a probe by a command
	case "wait":
		time.Sleep(math.MaxInt64)
	}
}

// HTTP/1 and HTTP/2 on 8080, gRPC's health check and reflection on 8081, an echo over TCP on 8082.
func serve() {
	go func() {
		server := grpc.NewServer()
		grpc_health_v1.RegisterHealthServer(server, health.NewServer())
		reflection.Register(server)
		panic(server.Serve(listen(":8081")))
	}()
	go func() {
		for listener := listen(":8082"); ; {
			if connection, err := listener.Accept(); err == nil {
				go func() {
					io.Copy(connection, connection)
					connection.Close()
				}()
			}
		}
	}()
	pod, _ := os.Hostname()
	var unhealthy atomic.Bool
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		wait, _ := time.ParseDuration(r.URL.Query().Get("wait"))
		time.Sleep(wait)
		from, _, _ := net.SplitHostPort(r.RemoteAddr)
		json.NewEncoder(w).Encode(map[string]string{
			"pod": pod, "from": from, "caller": r.Header.Get("X-Forwarded-Client-Cert"),
			"wasm": strings.Join(r.Header.Values("X-Wasm"), " ")})
	})
	// A registry of the files that are mounted here.
	http.HandleFunc("/v2/", func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "/manifests/") {
			w.Header().Set("Content-Type", "application/vnd.oci.image.manifest.v1+json")
		}
		http.ServeFile(w, r, r.URL.Path)
	})
	http.HandleFunc("/health", func(w http.ResponseWriter, r *http.Request) {
		if unhealthy.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	http.HandleFunc("/health/no", func(http.ResponseWriter, *http.Request) { unhealthy.Store(true) })
	http.HandleFunc("/health/yes", func(http.ResponseWriter, *http.Request) { unhealthy.Store(false) })
	server := http.Server{Addr: ":8080", Protocols: new(http.Protocols)}
	server.Protocols.SetHTTP1(true)
	server.Protocols.SetUnencryptedHTTP2(true)
	panic(server.ListenAndServe())
}

func listen(address string) net.Listener {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		panic(err)
	}
	return listener
}

// Go's own client would send some requests again; over HTTP/2 only those that were refused before they were handled.
type client struct {
	url        string
	kept       bool
	connection net.Conn
	reader     *bufio.Reader
	channel    *grpc.ClientConn
	http2      *http.Client
}

func (c *client) get() (body []byte, err error) {
	if strings.HasPrefix(c.url, "xds:") {
		return c.check()
	}
	if c.http2 != nil {
		response, err := c.http2.Get(c.url)
		if err != nil {
			return nil, err
		}
		return read(response)
	}
	request, err := http.NewRequest("GET", c.url, nil)
	if err != nil {
		return nil, err
	}
	request.Close = !c.kept
	if c.connection == nil {
		port := request.URL.Port()
		if port == "" {
			port = "80"
		}
		address := net.JoinHostPort(request.URL.Hostname(), port)
		if c.connection, err = net.DialTimeout("tcp", address, 5*time.Second); err != nil {
			return nil, err
		}
		c.reader = bufio.NewReader(c.connection)
	}
	closes := true
	defer func() {
		if closes {
			c.connection.Close()
			c.connection = nil
		}
	}()
	c.connection.SetDeadline(time.Now().Add(10 * time.Second))
	if err := request.Write(c.connection); err != nil {
		return nil, err
	}
	response, err := http.ReadResponse(c.reader, request)
	if err != nil {
		return nil, err
	}
	body, err = read(response)
	closes = err != nil || response.Close
	return body, err
}

func read(response *http.Response) ([]byte, error) {
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("status %d: %.200s", response.StatusCode, body)
	}
	return body, err
}

func (c *client) check() ([]byte, error) {
	if c.channel == nil {
		credentials, err := xds.NewClientCredentials(xds.ClientOptions{FallbackCreds: insecure.NewCredentials()})
		if err != nil {
			return nil, err
		}
		if c.channel, err = grpc.NewClient(c.url, grpc.WithTransportCredentials(credentials)); err != nil {
			return nil, err
		}
	}
	if !c.kept {
		defer func() {
			c.channel.Close()
			c.channel = nil
		}()
	}
	within, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var server peer.Peer
	_, err := grpc_health_v1.NewHealthClient(c.channel).Check(
		within, &grpc_health_v1.HealthCheckRequest{}, grpc.Peer(&server))
	if err != nil {
		return nil, err
	}
	return json.Marshal(map[string]string{"pod": server.Addr.String(), "security": server.AuthInfo.AuthType()})
}

type loads struct {
	// Ends with standard input.
	context.Context
	running sync.WaitGroup
	lock    sync.Mutex
	sent    int
	failed  []string
	pods    map[string]int
	kinds   map[string]map[string]int
	// Between the first failure and the last.
	first, last time.Time
}

func load(words []string) {
	flags := flag.NewFlagSet("load", flag.ExitOnError)
	hold := flags.Duration("hold", 12*time.Second, "how long a stream or a connection over TCP lives")
	flags.Parse(words)
	running, stop := context.WithCancel(context.Background())
	l := &loads{Context: running, failed: []string{}, pods: map[string]int{}, kinds: map[string]map[string]int{}}
	l.lock.Lock() // until all kinds are known
	for _, target := range flags.Args() {
		kind, rest, _ := strings.Cut(target, "://")
		l.kinds[kind] = map[string]int{"sent": 0, "failed": 0}
		switch kind {
		case "http", "xds": // two connections kept and two new ones at a time
			for number := range 4 {
				l.requests(20*time.Millisecond, target, &client{url: target, kept: number < 2})
			}
		case "h2c":
			for range 2 {
				transport := &http.Transport{Protocols: new(http.Protocols)}
				transport.Protocols.SetUnencryptedHTTP2(true)
				l.requests(20*time.Millisecond, target, &client{
					url: "http://" + rest, kept: true, http2: &http.Client{Transport: transport, Timeout: 10 * time.Second}})
			}
		case "get":
			l.requests(time.Second, target, &client{url: "http://" + rest})
		case "grpc":
			l.sessions(*hold, target, streams(rest))
			l.sessions(*hold, target, streams(rest))
		case "tcp":
			l.sessions(*hold, target, connections(rest))
			l.sessions(*hold, target, connections(rest))
		case "dns":
			l.queries(target, dns.Fqdn(rest))
		default:
			panic("no such kind: " + target)
		}
	}
	l.lock.Unlock()
	io.Copy(io.Discard, os.Stdin)
	stop()
	l.running.Wait()
	json.NewEncoder(os.Stdout).Encode(map[string]any{
		"sent": l.sent, "pods": l.pods, "failed": l.failed, "seconds": l.last.Sub(l.first).Seconds(), "by_kind": l.kinds})
}

func (l *loads) every(pause time.Duration, do func()) {
	l.running.Go(func() {
		for tick := time.Tick(pause); l.Err() == nil; <-tick {
			do()
		}
	})
}

func (l *loads) count(target, pod, more string, begun time.Time, err error) {
	kind, _, _ := strings.Cut(target, "://")
	l.lock.Lock()
	defer l.lock.Unlock()
	l.sent++
	l.kinds[kind]["sent"]++
	if err == nil {
		if pod != "" {
			l.pods[pod]++
		}
		return
	}
	l.kinds[kind]["failed"]++
	if l.first.IsZero() {
		l.first = begun
	}
	l.last = time.Now()
	l.failed = append(l.failed, fmt.Sprintf("%s %s %s after %v: %v",
		target, begun.UTC().Format("15:04:05.000"), more, time.Since(begun).Round(time.Millisecond), err))
}

func (l *loads) requests(pause time.Duration, target string, client *client) {
	worked := false
	l.every(pause, func() {
		kept, begun := client.connection != nil || client.http2 != nil && worked, time.Now()
		body, err := client.get()
		var told struct{ Pod string }
		if err == nil && !strings.HasPrefix(target, "get:") {
			err = json.Unmarshal(body, &told)
		}
		worked = err == nil
		l.count(target, told.Pod, fmt.Sprintf("kept=%t", kept), begun, err)
	})
}

func (l *loads) queries(target, name string) {
	config, err := dns.ClientConfigFromFile("/etc/resolv.conf")
	if err != nil {
		panic(err)
	}
	server := net.JoinHostPort(config.Servers[0], config.Port)
	client := &dns.Client{Timeout: 5 * time.Second}
	l.every(5*time.Millisecond, func() {
		// At most 1,000 wait.
		l.running.Go(func() {
			begun := time.Now()
			answer, _, err := client.Exchange(new(dns.Msg).SetQuestion(name, dns.TypeA), server)
			isA := func(record dns.RR) bool { return record.Header().Rrtype == dns.TypeA }
			if err == nil && (answer.Rcode != dns.RcodeSuccess || !slices.ContainsFunc(answer.Answer, isA)) {
				err = fmt.Errorf("%s with %v", dns.RcodeToString[answer.Rcode], answer.Answer)
			}
			l.count(target, "", "by "+server, begun, err)
		})
	})
}

// Opens a stream or connection that lasts as its context does, and returns what sends a message and gets its answer.
type session func(context.Context) (ask func(last bool) error, err error)

// One session after another.
func (l *loads) sessions(hold time.Duration, target string, open session) {
	l.every(100*time.Millisecond, func() {
		opened := time.Now()
		lasts, cancel := context.WithCancelCause(l)
		defer cancel(nil)
		limit := time.AfterFunc(5*time.Second, func() { cancel(errors.New("no answer in 5 s")) })
		defer limit.Stop()
		ask, err := open(lasts)
		tick := time.Tick(100 * time.Millisecond)
		for begun := opened; ; begun = time.Now() {
			held := time.Since(opened)
			if err == nil {
				err = ask(held >= hold)
			}
			if l.Err() != nil {
				return
			}
			if lasts.Err() != nil {
				err = context.Cause(lasts)
			}
			l.count(target, "", fmt.Sprintf("held=%v", held.Round(time.Millisecond)), begun, err)
			if err != nil || held >= hold {
				return
			}
			<-tick
			limit.Reset(5 * time.Second)
		}
	})
}

func streams(address string) session {
	// After a refused connection, gRPC's own pause grows to two minutes.
	pause := backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1, MaxDelay: 50 * time.Millisecond}
	channel, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: pause, MinConnectTimeout: 5 * time.Second}))
	if err != nil {
		panic(err)
	}
	request := &reflect.ServerReflectionRequest{MessageRequest: &reflect.ServerReflectionRequest_ListServices{}}
	return func(lasts context.Context) (func(bool) error, error) {
		stream, err := reflect.NewServerReflectionClient(channel).ServerReflectionInfo(lasts)
		return func(last bool) error {
			// An Envoy that drains sends GOAWAY on a connection with the next response.
			if _, err := grpc_health_v1.NewHealthClient(channel).Check(lasts, &grpc_health_v1.HealthCheckRequest{}); err != nil {
				return err
			}
			// Recv says why Send failed.
			stream.Send(request)
			if _, err := stream.Recv(); err != nil || !last {
				return err
			}
			stream.CloseSend()
			if _, err := stream.Recv(); err != io.EOF {
				return fmt.Errorf("no end: %v", err)
			}
			return nil
		}, err
	}
}

func connections(address string) session {
	return func(lasts context.Context) (func(bool) error, error) {
		connection, err := new(net.Dialer).DialContext(lasts, "tcp", address)
		if err != nil {
			return nil, err
		}
		context.AfterFunc(lasts, func() { connection.Close() })
		reader := bufio.NewReader(connection)
		return func(bool) error {
			line := time.Now().String() + "\n"
			io.WriteString(connection, line)
			echo, err := reader.ReadString('\n')
			if err == nil && echo != line {
				err = fmt.Errorf("%q instead of %q", echo, line)
			}
			return err
		}, nil
	}
}
