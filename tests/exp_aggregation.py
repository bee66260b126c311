import threading, time, sys, resource, socket
import numpy as np
from concurrent.futures import Future
from psclient._src.aggregation import follower as fmod, leader as lmod
from psclient._src.aggregation.host_group import HostGroup
from psclient._src.aggregation.link import LinkLost, Kind
from psclient._src.aggregation.sums import Own
from pswire.api import Contribution, RoundReply
from pswire.cluster import Task
from pswire.model.log import Epoch, Member
from pswire.model.plan import Plan, Reduction
from pswire.model.tensor import TensorSpec
from pswire.transport.payload import Payload
N=1<<18
spec=TensorSpec("float32",(N,))
plan=Plan(reductions=(Reduction("sum",spec,(0,1)),))
M=[Member(Task("worker",i),i+1,1) for i in range(3)]
epoch=Epoch(1,tuple(M))
pushed=[]
def push(server,said,payload):
    f=Future(); pushed.append((server,said,payload,f)); return f
singles=[]
def own(s,r,server=0,singly=None):
    def one():
        f=Future(); singles.append((s,r,f)); return f
    said=Contribution(s,1,r,plan.id,(1.0,),host=7,want=(0,))
    return Own(server,plan,said,Payload.pack([np.full(N,float(s),"float32")]),epoch.by_session,singly or one)
def reply(r,v): return RoundReply(r,epoch,False,(),Payload.pack([np.full(N,float(v),"float32")]))
def groups(name,n=2,lease=60.0):
    gs=[HostGroup(name+str(time.time()).encode() if i<0 else name,i+1,lease,push,lambda id:spec) for i in range(n)]
    return gs
def until(c,s=5):
    t=time.monotonic()+s
    while not c():
        if time.monotonic()>t: return False
        time.sleep(.005)
    return True
which=sys.argv[1]
gs=groups(b"exp"+which.encode()+str(time.time()).encode())
L,F=gs
L._role_now()
F._role_now(); until(lambda: len(L._role._links)==1); a=own(1,0); L.push(a)
b=own(2,0); F.push(b)
until(lambda: len(pushed)==1 or singles)
print("sum pushed:",len(pushed),"singles",len(singles))
if which=="overwrite":
    # a follower copies the answer of round 0 while its leader leaves, and the answer to round 1 comes
    a1,b1=own(1,1),own(2,1); F.push(b1); L.push(a1); until(lambda: len(pushed)==2)
    inside,go=threading.Event(),threading.Event(); real=fmod._copied
    def slow(p):
        inside.set(); go.wait(10); return real(p)
    fmod._copied=slow
    pushed[0][3].set_result(reply(0,111)); inside.wait(5)
    L.close()                                   # frees what the follower reads
    pushed[1][3].set_result(reply(1,222))       # in flight still: written to the same place
    go.set(); got=b.future.result(5)
    print("follower's answer to round 0 has", np.unique(got.payload.tensors([spec])[0]), "(should be 111)", "round", got.round)
if which=="eagain":
    link=next(iter(L._role._links))
    hold=threading.Event(); inside=threading.Event(); real=F._role._handle
    def slow(m): inside.set(); hold.wait(20); return real(m)
    F._role._handle=slow
    link.tell(Kind.SINGLY, 10**6); inside.wait(5)   # its thread has no time
    n=0
    try:
        while True: link.tell(Kind.FREED if False else Kind.ALIVE); n+=1
    except LinkLost as e: print("queue takes",n,"messages:",e)
    pushed[0][3].set_result(reply(0,111))
    hold.set()
    print("leader answered:",a.future.done(),"; follower's answered:",until(lambda:b.future.done(),8),
          "link still there:",len(L._role._links),"lost",F._role.lost)
if which=="raise":
    c=own(1,1); d=own(2,1); F.push(d); L.push(c); until(lambda: len(pushed)==2)
    bad=RoundReply(0,epoch,False,(),Payload.pack([np.zeros(3,"float32")]))
    # follower wants something else -> part_of cuts; size that does not fit raises
    e=own(1,2); object.__setattr__(e,'said',__import__('dataclasses').replace(e.said,want=())); g=own(2,2); F.push(g); L.push(e); until(lambda: len(pushed)==3)
    pushed[2][3].set_result(bad)
    print("after an answer that cannot be cut: leader done",until(lambda:e.future.done(),2),"follower done",g.future.done())
    def boom(): raise RuntimeError("cannot")
    h=own(1,3,singly=boom); i=own(2,3); F.push(i); L.push(h); until(lambda: len(pushed)==4)
    from pswire.errors import PushAgain
    pushed[3][3].set_exception(PushAgain("x"))
    print("after a push that raises something else: leader done",until(lambda:h.future.done(),2),"follower refused",until(lambda:any(s==(2,3) for *s,_ in [(x[0],x[1],0) for x in singles]) or len([x for x in singles if x[:2]==(2,3)])>0,2))
if which=="fds":
    resource.setrlimit(resource.RLIMIT_NOFILE,(4096,4096))
    keep=[socket.socket() for _ in range(1100)]
    G=HostGroup(L._name and b"exp",9,60.0,push,lambda id:spec); G._name=L._name
    try: G.push(own(3,5)); print("no error")
    except Exception as e: print("push raises",type(e).__name__,e)
if which=="slow_leader":
    # leader's worker never comes to a round (it is late): how long does the follower's contribution wait?
    b1=own(2,1); t=time.monotonic(); F.push(b1)
    print("follower's round waits for the leader's worker:", not until(lambda: any(x[:2]==(2,1) for x in singles),3), "after 3 s (lease 60)")
if which=="decided":
    for r in range(1,200):
        for sv in (0,1):
            x=own(1,r,sv); L.decline(0,0) if False else None
            L._role._offer((sv,r),None)
    L._role._offer((0,0),None)  # a late word on round 0
    print("open again:", list(L._role._open), )
for g in gs: g.close()
