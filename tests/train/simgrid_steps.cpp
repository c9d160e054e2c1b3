// Plays a graph of --predict --trace FILE.dot (commfuse/predict/record.h) in SimGrid: the same kernels, waits and links, shared by
// SimGrid's rules, max-min fairness at both ends of a transfer. Prints what the last step takes, in ms.
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <set>
#include <simgrid/s4u.hpp>
#include <vector>

namespace sg = simgrid::s4u;

static const double SPEED = 1e9; // of a host, flop/s: a kernel of t seconds has t · SPEED

struct node {
    int rank, to, link, waits = 0;
    double ms, bytes, bytes_per_s;
    bool kernel, step;
    std::vector<node *> next;
    sg::ActivityPtr activity;
};

static std::map<std::string, node> nodes;
static std::map<int, std::vector<double>> begun_s; // steps, by rank
static std::map<const sg::Activity *, node *> running;
static size_t done;

// --- the machine: a core for the kernels of each rank, one for what goes on beside them, and a link out and in on each level ---

static sg::NetZone *zone;
static std::map<std::string, sg::Host *> hosts;
static std::map<std::string, sg::Link *> links;
static std::set<std::pair<int, int>> joined;

static sg::Host *host(const char *name, int rank, int cores) {
    sg::Host *&h = hosts[name + std::to_string(rank)];
    if (!h) h = zone->create_host(name + std::to_string(rank), SPEED)->set_core_count(cores)->seal();
    return h;
}

static sg::Link *link(const char *way, int rank, const node &n) {
    const std::string name = way + std::to_string(rank) + "." + std::to_string(n.link);
    sg::Link *&l = links[name];
    if (!l) l = zone->create_link(name, n.bytes_per_s)->set_latency(0)->seal();
    return l;
}

static void join(const node &n) {
    if (n.bytes < 1 || n.to == n.rank || !joined.insert({n.rank, n.to}).second) return;
    const std::vector<sg::LinkInRoute> way = {sg::LinkInRoute(link("out", n.rank, n)), sg::LinkInRoute(link("in", n.to, n))};
    zone->add_route(host("rank", n.rank, 1)->get_netpoint(), host("rank", n.to, 1)->get_netpoint(), nullptr, nullptr, way, false);
}

// --- the graph ---

static double number(const std::string &line, const char *name, double otherwise) {
    const size_t at = line.find(name);
    return at == std::string::npos ? otherwise : std::stod(line.substr(at + strlen(name)));
}

static void read_line(const std::string &line) {
    const size_t bracket = line.find(" [");
    if (bracket != std::string::npos) {
        node &n = nodes[line.substr(0, bracket)];
        n.rank = (int)number(line, "rank=", 0), n.to = (int)number(line, "to=", 0), n.link = (int)number(line, "link=", 0);
        n.ms = number(line, "ms=", 0), n.bytes = number(line, "bytes=", 0), n.bytes_per_s = 1e9 * number(line, "gb_per_s=", 0);
        n.kernel = line.find("stream=") != std::string::npos, n.step = line.find("\"step\"") != std::string::npos;
        join(n);
        return;
    }
    std::string left = line.substr(0, line.find(';'));
    for (size_t at; (at = left.find(" -> ")) != std::string::npos; left = left.substr(at + 4)) {
        node &to = nodes[left.substr(at + 4, left.find(" -> ", at + 4) - at - 4)];
        nodes[left.substr(0, at)].next.push_back(&to);
        to.waits++;
    }
}

static void finish(node *n);

static void begin(node *n) {
    if (n->bytes >= 1 && n->to != n->rank)
        n->activity = sg::Comm::sendto_init(host("rank", n->rank, 1), host("rank", n->to, 1))->set_payload_size((uint64_t)n->bytes);
    else if (n->ms > 0)
        n->activity = sg::Exec::init()
                          ->set_flops_amount(1e-3 * SPEED * n->ms)
                          ->set_host(n->kernel ? host("rank", n->rank, 1) : host("beside", n->rank, 1 << 20));
    else
        return finish(n);
    running[n->activity.get()] = n;
    n->activity->vetoable_start();
}

static void finish(node *n) {
    done++;
    if (n->step) begun_s[n->rank].push_back(sg::Engine::get_clock());
    for (node *next : n->next)
        if (--next->waits == 0) begin(next);
}

int main(int argc, char **argv) {
    sg::Engine engine(&argc, argv);
    for (const char *rule : {"network/model:CM02", "network/TCP-gamma:0", "network/crosstraffic:0", "network/latency-factor:1",
                             "network/bandwidth-factor:1", "network/weight-S:0"})
        sg::Engine::set_config(rule);
    zone = sg::create_full_zone("machine");
    std::ifstream in(argv[1]);
    for (std::string line; std::getline(in, line);) read_line(line);
    for (const auto &n : nodes) host("rank", n.second.rank, 1), host("beside", n.second.rank, 1 << 20);
    zone->seal();
    sg::Activity::on_completion_cb([](const sg::Activity &a) { finish(running.at(&a)); });
    std::vector<node *> first;
    for (auto &n : nodes)
        if (n.second.waits == 0) first.push_back(&n.second);
    for (node *n : first) begin(n);
    engine.run();
    if (done != nodes.size()) {
        std::cerr << done << " of " << nodes.size() << " nodes were done\n";
        return 1;
    }
    double from = 0, to = 0;
    for (const auto &rank : begun_s) {
        from = std::max(from, rank.second[rank.second.size() - 2]);
        to = std::max(to, rank.second.back());
    }
    std::cout << 1e3 * (to - from) << "\n";
    return 0;
}
